"""Reads and writes append-only files of records, one per line: the record of a run, its metrics log and others.

A name that ends in ``.jsonl`` is a file of JSON lines. Any other is a JSON array, valid after every record: ``[``,
records joined by ``,`` and a line break, and ``]`` on the last line. Appending is a single positioned write of the
separator, the record and a new closing over the old one. A process killed at any time therefore leaves either the
previous file or one whose last record is truncated, which `read_records` skips. NaN and infinities are written as by
Python's ``json`` (``NaN``, ``Infinity``).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from onstep.errors import OnstepError
from onstep.files.durability import replace_durably, try_to_sync
from onstep.files.json_values import encode
from onstep.processes.forking import release_in_forked_children
from onstep.record.decoding import Decoded, decode, decode_rest
from onstep.record.digests import hash_of
from onstep.record.ends import end_of_body, end_of_record, ends_of
from onstep.record.forms import ARRAY, form_of
from onstep.record.names import free_name, rename_aside

Record = dict[str, Any]

WALL_CLOCK_FIELDS = (
    "timestamp",
    "*_runtime",
    "*_per_second",
    "*_per_second_per_device",
    "seconds_*",
    "goodput",
    "tok_per_sec",
    "mfu",
    "peak_mem",
    "peak_mem_allocated",
    "bridge",
    "log_digest",
    "record_position",
)
"""Fields that depend on time or machine; all others are identical in a run that was killed and resumed."""


class MetricsLogError(OnstepError):
    """A file is not a metrics log, or an operation on a metrics log would lose records."""


class DamagedMetricsLogError(MetricsLogError):
    """A metrics log is damaged before its last record.

    Attributes:
        records: those before the damage.
    """

    def __init__(self, message: str, records: list[Record]) -> None:
        super().__init__(message)
        self.records = records


class MetricsLogHeldError(MetricsLogError):
    """The metrics log is open in another live writer."""


class MetricsLog(AbstractContextManager["MetricsLog"]):
    """A metrics log open for appending. The file is locked against a second writer until `close` or the end of the
    process.

    Forked children (a data loader's workers) do not hold the lock and cannot append.
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
            return cls(path, _locked(path, os.O_CREAT | (os.O_EXCL if mode == "x" else 0)))
        except FileExistsError:
            raise MetricsLogError(f"{path} already exists; pass mode 'a' to continue it, or rename it first.") from None

    @classmethod
    def open_aligned(cls, path: Path) -> MetricsLog:
        """Open a metrics log that was aligned before, or start one; raises `MetricsLogHeldError` as `open` does."""
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(path, _locked(path, os.O_CREAT))

    @classmethod
    def open_at(
        cls, path: Path, order: Callable[[Record], int], most: int, is_known: Callable[[Record, Record], bool]
    ) -> tuple[MetricsLog, list[Record], Path | None] | None:
        """Open a metrics log of which a record and what precedes it are known, without decoding more than its ends.

        Records that follow are moved to ``<name>.branch-<n>.json``, as by `align`.

        Args:
            order: As for `end_of_record`: finds the last known record, one of at most `most` that are returned.
            is_known: Passed the first record and the last known one.

        Returns:
            The log, its last records, oldest first, and the file with the removed ones; None, with nothing changed, if
            the file must be read as a whole instead: it is not known, or is damaged after that record.

        Raises:
            MetricsLogHeldError: if another live writer has the file open.
        """
        if not path.is_file():
            return None
        with ExitStack() as unless_opened:
            descriptor = _locked(path)
            unless_opened.callback(os.close, descriptor)
            num_bytes, form = end_of_record(descriptor, order), form_of(path)
            ends = None if num_bytes is None else ends_of(descriptor, num_bytes, most, form)
            if num_bytes is None or ends is None or not is_known(ends[0], ends[1][-1]):
                return None
            cut = decode_rest(os.pread(descriptor, os.fstat(descriptor).st_size - num_bytes, num_bytes), form)
            if cut is None:
                return None
            branch = _write_branch(path, cut)
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

        Raises:
            MetricsLogError: if the metrics log is closed.
            OSError: if the disk is full or unavailable; the file is left unchanged.
        """
        self.append_encoded(encode(record))

    def append_encoded(self, text: str) -> None:
        """Append a record that `encode` has encoded; raises the same errors as `append`."""
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


def read_records(path: str | Path, num_bytes: int | None = None) -> list[Record]:
    """Read the records of a metrics log, even one that is being written or whose writer was killed.

    Tolerates a missing closing bracket, a trailing comma and a truncated last record, which is skipped. An empty file
    has no records.

    Args:
        num_bytes: Where the last record to read ends; None reads all.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogError: if the file is not a metrics log, or is damaged before its last record.
    """
    path = Path(path)
    if path.exists() and not (path.is_file() or path.is_dir()):  # a named pipe or a device does not end by itself
        raise MetricsLogError(f"{path} is not a metrics log: it is not a regular file.")
    decoded = _decoded(path, num_bytes)
    if decoded.foreign is not None:
        raise MetricsLogError(f"{path} is not a metrics log: {decoded.foreign}.")
    if decoded.damage is not None:
        raise DamagedMetricsLogError(f"{path} is damaged{decoded.damage}.", decoded.records)
    return decoded.records


def leading_records(path: str | Path) -> list[Record]:
    """The records of a metrics log up to its first damage; [] for a file that is missing or not a metrics log."""
    try:
        return _decoded(Path(path)).records if Path(path).is_file() else []
    except (FileNotFoundError, IsADirectoryError):
        return []


def align(path: str | Path, last_step: int | None = None, *, num_records: int | None = None) -> Path | None:
    """Truncate the metrics log at `path` to `last_step`, so that a run resumed from there can append to it.

    Returns the file with the removed records, or the renamed file, or None.

    Records with a `global_step` (default 0) beyond `last_step`, and those after the first `num_records`, are moved to
    ``<name>.branch-<n>.json``. A file that is not a metrics log, or a directory, is renamed to
    ``<name>.unreadable-<n>.json``, and so is a damaged file; with `num_records`, those of its records that precede the
    damage are kept in the metrics log. It is replaced atomically, or left untouched if nothing changes.

    Args:
        last_step: The last step to keep; None keeps all and only repairs damage from a crash.
        num_records: Maximum number of records to keep; None sets no limit.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogHeldError: if a live writer has the file open.
    """
    return align_to(path, up_to(last_step, num_records))[1]


def up_to(last_step: int | None = None, num_records: int | None = None) -> Callable[[list[Record], bool], list[Record]]:
    """What `align_to` keeps for `align`."""
    limit = math.inf if last_step is None else last_step

    def chosen(records: list[Record], is_damaged: bool) -> list[Record]:
        if is_damaged:
            return records[: num_records or 0]
        return [record for record in records[:num_records] if not _step_of(record) > limit]

    return chosen


def align_to(
    path: str | Path, chosen: Callable[[list[Record], bool], list[Record] | None]
) -> tuple[list[Record], Path | None]:
    """Truncate the metrics log at `path` as `align` does, to the records that `chosen` returns.

    Args:
        chosen: Passed the records, up to the first damage, and whether the file is damaged or not a metrics log;
            returns those to keep, or None to `set_aside` the file.

    Returns:
        The records kept, and the file with the removed ones, or the renamed file, or None.
    """
    path = Path(path)
    if path.is_dir():
        chosen([], True)
        return [], rename_aside(path, "unreadable-")
    with os.fdopen(_locked(path)):
        decoded = _decoded(path) if path.is_file() else Decoded(foreign="it is not a regular file")
        is_damaged = decoded.damage is not None or decoded.foreign is not None
        kept = chosen(decoded.records, is_damaged)
        if kept is None or is_damaged:
            aside = rename_aside(path, "" if kept is None else "unreadable-")
            if kept:
                _replace(path, kept)
            return kept or [], aside
        ids = set(map(id, kept))
        cut = [record for record in decoded.records if id(record) not in ids]
        if decoded.is_complete and not cut:
            return kept, None
        branch = _write_branch(path, cut)
        _replace(path, kept)
        return kept, branch


def fork(path: str | Path, target: str | Path, *, num_records: int | None = None) -> None:
    """Start a metrics log at `target` with the first records of another run's at `path`, which is not modified.

    Args:
        path: The metrics log to copy from; it may be open in a live writer.
        target: The new metrics log; must not exist.
        num_records: Number of records to copy; None copies all.

    Raises:
        MetricsLogError: if `target` exists.
    """
    target = Path(target)
    if target.exists():
        raise MetricsLogError(f"{target} already exists; rename it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, read_records(path)[:num_records])


def set_aside(path: str | Path) -> Path:
    """Rename the metrics log at `path` to ``<name>.<n>.json`` with the first free number, and return the new path.

    A directory with that name becomes ``<name>.unreadable-<n>.json``.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogHeldError: if a live writer has the file open.
    """
    path = Path(path)
    if path.is_dir():
        return rename_aside(path, "unreadable-")
    with os.fdopen(_locked(path)):
        return rename_aside(path, "")


def without_wall_clock(record: Record) -> Record:
    """The record without `WALL_CLOCK_FIELDS`: the part that is identical in an uninterrupted and a resumed run."""
    return {key: value for key, value in record.items() if not any(fnmatchcase(key, one) for one in WALL_CLOCK_FIELDS)}


def _decoded(path: Path, num_bytes: int | None = None) -> Decoded:
    content = form_of(path).array(path.read_bytes()[:num_bytes])
    return decode(content + (b"" if num_bytes is None else ARRAY.closing))


def _step_of(record: Record) -> float:
    step = record.get("global_step")
    return step if isinstance(step, (int, float)) else 0


def _write_branch(path: Path, records: list[Record]) -> Path | None:
    """Write records that are removed from a metrics log to a file beside it; None if there are none."""
    if not records:
        return None
    branch = free_name(path, "branch-")
    _replace(branch, records)
    return branch


def _replace(path: Path, records: list[Record]) -> None:
    """Write a complete metrics log atomically."""
    replace_durably(path, form_of(path).content([encode(one).encode("ascii") for one in records]))


def _locked(path: Path, flags: int = 0) -> int:
    descriptor = os.open(path, os.O_RDWR | flags, 0o666)
    try:
        is_free = lock_descriptor(descriptor, blocking=False)
    except OSError:
        is_free = True  # a file system without locks (some network mounts) cannot detect a second writer
    if not is_free:
        os.close(descriptor)
        raise MetricsLogHeldError(
            f"{path} is being written by another live run; use another directory for this run, or stop the other one."
        )
    return descriptor
