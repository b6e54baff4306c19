"""Writes append-only files of records, one per line: the record of a run, its metrics log and others.

A name that ends in ``.jsonl`` is a file of JSON lines. Any other is a JSON array, valid after every record: ``[``,
records joined by ``,`` and a line break, and ``]`` on the last line. Appending is a single positioned write of the
separator, the record and a new closing over the old one. A process killed at any time therefore leaves either the
previous file or one whose last record is truncated, which `read_records` skips. NaN and infinities are written as by
Python's ``json`` (``NaN``, ``Infinity``).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

from onstep.files.durability import try_to_sync
from onstep.files.json_values import encode
from onstep.processes.forking import release_in_forked_children
from onstep.record.cutting import align, locked, write_branch
from onstep.record.decoding import decode_rest
from onstep.record.digests import hash_of
from onstep.record.ends import end_of_body, end_of_record, ends_of
from onstep.record.forms import form_of
from onstep.record.reading import MetricsLogError, Record


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """A metrics log open for appending. The file is locked against a second writer until `close` or the end of the
    process.

    Forked children (a data loader's workers) do not hold the lock and cannot append.

    Args:
        path: the file, as messages name it.
        descriptor: of the same file, open for writing and locked; closed by `close`.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        self._form = form_of(path)
        if os.fstat(descriptor).st_size == 0:
            os.pwrite(descriptor, self._form.content([]), 0)
        self._tail, self._has_records = end_of_body(descriptor, self._form)
        """Offset of the next separator, which overwrites the closing."""
        self._undo(descriptor)
        self._hasher = hash_of(descriptor, self._tail)
        release_in_forked_children(self, MetricsLog._release)

    @classmethod
    def open(cls, path: str | Path, mode: str = "a") -> MetricsLog:
        """Open the metrics log at `path`, creating its directory if needed.

        Args:
            mode: "a" continues an existing metrics log (a record truncated by a crash is dropped, an unreadable file is
                renamed) or starts one; "x" starts one and fails if the file exists.

        Raises:
            MetricsLogError: in mode "x", if the file exists; for an unknown mode.
            MetricsLogHeldError: if another live writer has the file open.
        """
        path = Path(path)
        if mode not in ("a", "x"):
            raise MetricsLogError(f"mode must be 'a' (continue) or 'x' (create), got {mode!r}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == "a" and path.exists():
            align(path)
        try:
            return cls(path, locked(path, os.O_CREAT | (os.O_EXCL if mode == "x" else 0)))
        except FileExistsError:
            raise MetricsLogError(f"{path} already exists; pass mode 'a' to continue it, or rename it first.") from None

    @classmethod
    def open_aligned(cls, path: Path) -> MetricsLog:
        """Open a metrics log that was aligned before, or start one; raises `MetricsLogHeldError` as `open` does.

        Args:
            path: the file; missing directories above it are made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path, locked(path, os.O_CREAT))

    @classmethod
    def open_at(
        cls, path: Path, order: Callable[[Record], int], most: int, is_known: Callable[[Record, Record], bool]
    ) -> tuple[MetricsLog, list[Record], Path | None] | None:
        """Open a metrics log of which a record and what precedes it are known, without decoding more than its ends.

        Records that follow are moved to ``<name>.branch-<n>.json``, as by `align`.

        Args:
            order: As for `end_of_record`: finds the last known record, one of at most `most` that are returned.
            is_known: Passed the first record and the last known one.
            path: the file.

        Returns:
            The log, its last records, oldest first, and the file with the removed ones; None, with nothing changed, if
            the file must be read as a whole instead: it is not known, or is damaged after that record.

        Raises:
            MetricsLogHeldError: if another live writer has the file open.
        """
        if not path.is_file():
            return None
        with ExitStack() as unless_opened:
            descriptor = locked(path)
            unless_opened.callback(os.close, descriptor)
            num_bytes, form = end_of_record(descriptor, order), form_of(path)
            ends = None if num_bytes is None else ends_of(descriptor, num_bytes, most, form)
            if num_bytes is None or ends is None or not is_known(ends[0], ends[1][-1]):
                return None
            cut = decode_rest(os.pread(descriptor, os.fstat(descriptor).st_size - num_bytes, num_bytes), form)
            if cut is None:
                return None
            branch = write_branch(path, cut)
            os.ftruncate(descriptor, num_bytes)  # if killed here, the file lacks its closing, which readers accept
            os.pwrite(descriptor, form.closing, num_bytes)
            metrics_log = cls(path, descriptor)
            unless_opened.pop_all()
        return metrics_log, ends[1], branch

    @property
    def num_bytes(self) -> int:
        """Size of the file up to the end of its last record."""
        return self._tail

    @property
    def digest(self) -> str:
        """BLAKE3 of these bytes, as they were read on opening and appended since."""
        return self._hasher.hexdigest()

    def append(self, record: Record) -> None:
        """Append a record; when this returns, the file is valid JSON and contains the record.

        NumPy and torch values are written as plain numbers and lists; values that JSON cannot represent as their `str`
        or `repr`. A record is never rejected because of its values.

        Args:
            record: the values by name; JSON can hold them.

        Raises:
            MetricsLogError: if the metrics log is closed.
            OSError: if the disk is full or unavailable; the file is left unchanged.
        """
        self.append_encoded(encode(record))

    def append_encoded(self, text: str) -> None:
        """Append a record that `encode` has encoded; raises the same errors as `append`.

        Args:
            text: the record as JSON on one line.
        """
        if self._descriptor is None:
            raise MetricsLogError(f"{self.path} is closed; reopen it with MetricsLog.open(path, 'a') to append to it.")
        self._settle(self._descriptor)
        form = self._form
        line = (form.between if self._has_records else form.before_first) + text.encode("ascii")
        data, written = line + form.closing, 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._tail + written)
        except OSError:
            self._undo(self._descriptor)
            raise
        self._hasher.update(line)
        self._tail += len(line)
        self._has_records = True

    def sync(self) -> bool:
        """Make the file durable, wherever its directory was renamed to; a refusal is logged. Returns whether it is."""
        return try_to_sync(self.path, self._descriptor)

    def close(self) -> None:
        """Fsync and close the file, even if the fsync fails; idempotent."""
        try:
            if self._descriptor is not None:
                os.fsync(self._descriptor)
        finally:
            self._release()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _settle(self, descriptor: int) -> None:
        """Complete or undo an append that was interrupted by an exception (Ctrl-C)."""
        size, closing = os.fstat(descriptor).st_size, self._form.closing
        if size == self._tail + len(self._form.end(self._has_records)):
            return
        if os.pread(descriptor, len(closing), size - len(closing)) == closing:
            self._tail = size - len(closing)
            self._hasher = hash_of(descriptor, self._tail)
            self._has_records = True
        else:
            self._undo(descriptor)

    def _undo(self, descriptor: int) -> None:
        """Truncate the file after the last complete record."""
        end = self._form.end(self._has_records)
        os.pwrite(descriptor, end, self._tail)
        os.ftruncate(descriptor, self._tail + len(end))

    def _release(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", None), None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = _release
