"""Reads and writes the metrics log of a run: an append-only JSON array, one record per line, valid after every record.

The file consists of ``[``, records joined by ``,`` and a line break, and ``]`` on the last line. Appending is a single
positioned write of the separator, the record and a new closing bracket over the old one. A process killed at any time
therefore leaves either the previous file or one whose last record is truncated, which `read_records` skips. NaN and
infinities are written as by Python's ``json`` (``NaN``, ``Infinity``).
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from onstep.errors import OnstepError
from onstep.forking import release_in_forked_children
from onstep.json_values import encode

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
)
"""Fields that depend on time or machine; all others are identical in a run that was killed and resumed."""

_CLOSING = b"\n]"
_BLANK = " \t\r\n\x00"
"""White space, and the zeros that some file systems leave at the end of a file after a power failure."""
_SEPARATOR = re.compile(rf"[{_BLANK}]*(,?)[{_BLANK}]*")
_CUT_TOKEN = re.compile(r'(?:"[^\n]*|[-+.\\\w]*)\Z')
"""What can follow a decoding error at the end of a truncated text."""


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
        if os.fstat(descriptor).st_size == 0:
            os.pwrite(descriptor, b"[" + _CLOSING, 0)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        body = text.rstrip()[:-1].rstrip()
        self._tail = len(body)
        """Offset of the next separator, which overwrites the closing bracket."""
        self._separator = b"\n" if body.endswith(b"[") else b",\n"
        self._undo(descriptor)
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
        line = self._separator + text.encode("ascii")
        data, written = line + _CLOSING, 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._tail + written)
        except OSError:
            self._undo(self._descriptor)
            raise
        self._tail += len(line)
        self._separator = b",\n"

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
        size = os.fstat(descriptor).st_size
        if size == self._tail + len(_CLOSING):
            return
        if os.pread(descriptor, len(_CLOSING), size - len(_CLOSING)) == _CLOSING:
            self._tail = size - len(_CLOSING)
            self._separator = b",\n"
        else:
            self._undo(descriptor)

    def _undo(self, descriptor: int) -> None:
        """Truncate the file after the last complete record."""
        os.pwrite(descriptor, _CLOSING, self._tail)
        os.ftruncate(descriptor, self._tail + len(_CLOSING))

    def _release(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", None), None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = _release


def read_records(path: str | Path) -> list[Record]:
    """Read the records of a metrics log, even one that is being written or whose writer was killed.

    Tolerates a missing closing bracket, a trailing comma and a truncated last record, which is skipped. An empty file
    has no records.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogError: if the file is not a metrics log, or is damaged before its last record.
    """
    return _decode(Path(path))[0]


def leading_records(path: str | Path) -> list[Record]:
    """The records of a metrics log up to its first damage; [] for a file that is missing or not a metrics log."""
    try:
        return read_records(path)
    except DamagedMetricsLogError as error:
        return error.records
    except (FileNotFoundError, IsADirectoryError, MetricsLogError):
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
    path = Path(path)
    if path.is_dir():
        return _rename_aside(path, "unreadable-")
    with os.fdopen(_locked(path)):
        try:
            records, is_complete = _decode(path)
        except MetricsLogError as error:
            aside = _rename_aside(path, "unreadable-")
            if num_records and isinstance(error, DamagedMetricsLogError):
                _replace(path, error.records[:num_records])
            return aside
        limit = math.inf if last_step is None else last_step
        first = records[:num_records]
        kept = [record for record in first if not _step_of(record) > limit]
        cut = [record for record in first if _step_of(record) > limit] + records[len(first) :]
        if is_complete and not cut:
            return None
        branch = _free_name(path, "branch-") if cut else None
        if branch is not None:
            _replace(branch, cut)
        _replace(path, kept)
        return branch


def fork(path: str | Path, target: str | Path, *, num_records: int | None = None) -> None:
    """Start a metrics log at `target` with the first records of another run's metrics log at `path`, which is not
    modified.

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
        return _rename_aside(path, "unreadable-")
    with os.fdopen(_locked(path)):
        return _rename_aside(path, "")


def numbered_name(path: str | Path) -> Path:
    """The first of ``<name>.1.json``, ``<name>.2.json``, ... that does not exist."""
    return next(name for name in _names(Path(path), "") if not name.exists())


def without_wall_clock(record: Record) -> Record:
    """The record without `WALL_CLOCK_FIELDS`: the part that is identical in an uninterrupted and a resumed run."""
    return {key: value for key, value in record.items() if not any(fnmatchcase(key, one) for one in WALL_CLOCK_FIELDS)}


def _decode(path: Path) -> tuple[list[Record], bool]:
    """The records, and whether the file is a complete JSON array."""
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():  # neither ends by itself: a named pipe, a device
        raise MetricsLogError(f"{path} is not a metrics log: it is not a regular file.")
    content = path.read_bytes()
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content)  # the last character may be truncated
    except UnicodeDecodeError as error:
        text = content[: error.start].decode()
        if not text.lstrip().startswith("["):
            raise MetricsLogError(f"{path} is not a metrics log: it is not text ({error}).") from error
        raise _damaged(path, f": it is not text ({error})", _decode_one_by_one(text.strip(_BLANK), path)) from error
    if not text.strip(_BLANK):
        return [], False
    if not text.lstrip().startswith("["):
        raise MetricsLogError(f"{path} is not a metrics log: it begins with {text[:20]!r} instead of '['.")
    try:
        records, is_complete = json.loads(text), True
    except (ValueError, RecursionError):
        records, is_complete = _decode_one_by_one(text.strip(_BLANK), path), False
    if not all(isinstance(record, dict) for record in records):
        raise MetricsLogError(f"{path} is not a metrics log: its array contains values other than objects.")
    return records, is_complete


def _decode_one_by_one(text: str, path: Path) -> list[Any]:
    """The records up to the end of `text` or to a truncated last record."""
    decoder = json.JSONDecoder()
    records: list[Any] = []
    position = len(text) - len(text[1:].lstrip(_BLANK))
    while position < len(text):
        if text[position] == "]":
            if text[position + 1 :].strip(_BLANK):
                raise _damaged(path, f": there is data after the closing ']' at character {position}", records)
            break
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if not _CUT_TOKEN.match(text, error.pos):  # a record may be skipped only at the end of the text
                raise _damaged(path, f" at character {error.pos}: {error.msg}", records) from error
            break
        except (ValueError, RecursionError) as error:  # a number that is too long, or deep nesting
            raise _damaged(path, f" in record {len(records) + 1}: {error}", records) from error
        records.append(record)
        separator = _SEPARATOR.match(text, position)
        assert separator is not None
        position = separator.end()
        if position < len(text) and text[position] != "]" and not separator[1]:
            raise _damaged(path, f": a ',' is missing at character {position}", records)
    return records


def _damaged(path: Path, what: str, values: list[Any]) -> DamagedMetricsLogError:
    records = list(takewhile(lambda value: isinstance(value, dict), values))
    return DamagedMetricsLogError(f"{path} is damaged{what}.", records)


def _step_of(record: Record) -> float:
    step = record.get("global_step")
    return step if isinstance(step, (int, float)) else 0


def _replace(path: Path, records: list[Record]) -> None:
    """Write a complete metrics log atomically."""
    body = ",".join("\n" + encode(record) for record in records)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        file.write(b"[" + body.encode("ascii") + _CLOSING)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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


def _rename_aside(path: Path, label: str) -> Path:
    name = _free_name(path, label)
    os.replace(path, name)
    return name


def _free_name(path: Path, label: str) -> Path:
    """An unused name like ``<name>.<label><n>.json``, reserved against other processes by an empty file or
    directory.
    """
    names = _names(path, label)
    while True:
        name = next(names)
        with suppress(FileExistsError):
            if path.is_dir() and not path.is_symlink():
                name.mkdir()
            else:
                name.touch(exist_ok=False)
            return name


def _names(path: Path, label: str) -> Iterator[Path]:
    return (path.with_name(f"{path.stem}.{label}{number}{path.suffix}") for number in count(1))
