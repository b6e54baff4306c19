"""The journal of a run: a JSON array of records that only grows, one record a line, valid between any two records.

The file reads ``[``, records joined by ``,`` and a line break, and ``]`` on the last line. Appending is one positioned
write of the separator, the record and a new closing bracket over the old one, so that a process killed at any moment
leaves either the file as it was or a file whose last record is cut short, which `read_records` leaves out. NaN and the
infinities are written as Python's ``json`` spells them (``NaN``, ``Infinity``).
"""

from __future__ import annotations

import codecs
import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from onstep.errors import OnstepError
from onstep.forking import release_in_forked_children

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
"""What a record tells of the clock and the machine; all else is the same in a run that was killed and resumed."""

_CLOSING = b"\n]"
_BLANK = " \t\r\n\x00"
"""White space, and the zeros that some file systems leave at the end of a file after a power cut."""
_SEPARATOR = re.compile(rf"[{_BLANK}]*(,?)[{_BLANK}]*")
_MOST_NESTED = 100
"""How deep a value is followed that JSON cannot hold as it is."""
_CUT_TOKEN = re.compile(r'(?:"[^\n]*|[-+.\\\w]*)\Z')
"""What may stand between a decoding error and the end of the text when writing stopped there."""


class JournalError(OnstepError):
    """A file that is no journal, or a journal used in a way that would lose records."""


class JournalHeldError(JournalError):
    """Another live writer has the journal open."""


class Journal(AbstractContextManager["Journal"]):
    """A journal open for appending. The file is locked against a second writer until `close` or the process's end.

    A forked child (a data loader's worker) neither keeps the lock nor can append.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor
        if os.fstat(descriptor).st_size == 0:
            os.pwrite(descriptor, b"[" + _CLOSING, 0)
        text = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        body = text.rstrip()[:-1].rstrip()
        self._tail = len(body)
        """Where the next separator goes: over the closing bracket."""
        self._separator = b"\n" if body.endswith(b"[") else b",\n"
        self._take_back(descriptor)
        release_in_forked_children(self, Journal._release)

    @classmethod
    def open(cls, path: str | Path, mode: str = "a") -> Journal:
        """Open the journal at `path`, making its folder if needed.

        Args:
            mode: "a" continues an existing journal (a record cut short by a crash is left out, an unreadable file is
                set aside) or begins one; "x" begins one and refuses an existing file.

        Raises:
            JournalError: in mode "x", when the file exists; for an unknown mode.
            JournalHeldError: when another live writer has the file open.
        """
        path = Path(path)
        if mode not in ("a", "x"):
            raise JournalError(f"mode must be 'a' (continue) or 'x' (begin), got {mode!r}.")
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == "a" and path.exists():
            align(path)
        try:
            return cls(path, _locked(path, os.O_CREAT | (os.O_EXCL if mode == "x" else 0)))
        except FileExistsError:
            raise JournalError(f"{path} exists; pass mode 'a' to continue it, or move it aside first.") from None

    def append(self, record: Record) -> None:
        """Add one record; when this returns, the file is valid JSON with the record in it.

        Numpy and torch values are written as plain numbers and lists, what JSON has no form for as its `str` or `repr`:
        a record is never refused for what it holds.

        Raises:
            JournalError: when the journal is closed.
            OSError: when the disk is full or gone; the file is left as it was before.
        """
        if self._descriptor is None:
            raise JournalError(f"{self.path} is closed; open it again with Journal.open(path, 'a') to append to it.")
        self._settle(self._descriptor)
        line = self._separator + encode(record).encode("ascii")
        data, written = line + _CLOSING, 0
        try:
            while written < len(data):
                written += os.pwrite(self._descriptor, data[written:], self._tail + written)
        except OSError:
            self._take_back(self._descriptor)
            raise
        self._tail += len(line)
        self._separator = b",\n"

    def close(self) -> None:
        """Let go of the file, durably; closing twice is harmless."""
        if self._descriptor is not None:
            os.fsync(self._descriptor)
            self._release()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _settle(self, descriptor: int) -> None:
        """Take in what an append left that an exception (Ctrl-C) interrupted."""
        size = os.fstat(descriptor).st_size
        if size == self._tail + len(_CLOSING):
            return
        if os.pread(descriptor, len(_CLOSING), size - len(_CLOSING)) == _CLOSING:
            self._tail = size - len(_CLOSING)
            self._separator = b",\n"
        else:
            self._take_back(descriptor)

    def _take_back(self, descriptor: int) -> None:
        """End the file after the last whole record."""
        os.pwrite(descriptor, _CLOSING, self._tail)
        os.ftruncate(descriptor, self._tail + len(_CLOSING))

    def _release(self) -> None:
        descriptor, self._descriptor = getattr(self, "_descriptor", None), None
        if descriptor is not None:
            os.close(descriptor)

    __del__ = _release


def read_records(path: str | Path) -> list[Record]:
    """The records of a journal, also of one that is being written or whose writer was killed.

    A missing closing bracket, a trailing comma and a last record cut short (left out) are expected. An empty file has
    no records.

    Raises:
        FileNotFoundError: when there is no such file.
        JournalError: when the file is no journal, or is damaged before its last record.
    """
    return _decode(Path(path))[0]


def align(path: str | Path, last_step: int | None = None, *, num_records: int | None = None) -> Path | None:
    """Make the journal at `path` end at `last_step`, so that a run which continues from there can append to it.

    Returns the file that was set aside, or None.

    Records with a `global_step` (0 where there is none) beyond `last_step`, and those beyond the first `num_records`,
    are kept aside in ``<name>.branch-<n>.json``. A file that is no journal, or a folder, is renamed to
    ``<name>.unreadable-<n>.json``. The journal is replaced in one atomic step, and left untouched where nothing is to
    be done.

    Args:
        last_step: The last step to keep; None keeps all and only repairs what a crash left.
        num_records: How many records to keep at the most; None sets no limit.

    Raises:
        FileNotFoundError: when there is no such file.
        JournalHeldError: when a live writer has the file open.
    """
    path = Path(path)
    if path.is_dir():
        return _rename_aside(path, "unreadable-")
    with os.fdopen(_locked(path)):
        try:
            records, is_complete = _decode(path)
        except JournalError:
            return _rename_aside(path, "unreadable-")
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
    """Begin a journal at `target` with the first records of another run's at `path`, which is left as it is.

    Args:
        path: The journal to take from; it may be open in a live writer.
        target: Where to begin; nothing may be there.
        num_records: How many records to take; None takes all.

    Raises:
        JournalError: when `target` exists.
    """
    target = Path(target)
    if target.exists():
        raise JournalError(f"{target} exists; move it aside first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, read_records(path)[:num_records])


def set_aside(path: str | Path) -> Path:
    """Rename the journal at `path` to ``<name>.<n>.json``, the first number that is free, and return that.

    A folder of that name becomes ``<name>.unreadable-<n>.json``.

    Raises:
        FileNotFoundError: when there is no such file.
        JournalHeldError: when a live writer has the file open.
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
    """The record without `WALL_CLOCK_FIELDS`: what an uninterrupted run and a resumed one have in common."""
    return {key: value for key, value in record.items() if not any(fnmatchcase(key, one) for one in WALL_CLOCK_FIELDS)}


def encode(record: Record) -> str:
    """One line of JSON; NaN and the infinities as Python's ``json`` spells them.

    Keys and values that JSON cannot hold (tuples as keys, circular or very deep values) become text where they stand.
    """
    try:
        return json.dumps(record, default=_plain)
    except Exception:  # noqa: BLE001 - the values' own code may raise anything, and no record is lost for one value
        return json.dumps(_held(record))


def _plain(value: Any) -> Any:
    """What JSON has a form for: lists and numbers for arrays and tensors, text for the rest."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else str(value)


def _held(value: Any, around: tuple[int, ...] = ()) -> Any:
    """`value` with text in the place of what JSON cannot hold; `around` are the ids of the containers it is in."""
    if isinstance(value, (dict, list, tuple)):
        if id(value) in around or len(around) >= _MOST_NESTED:
            return _text(value)
        inside = (*around, id(value))
        if isinstance(value, dict):
            return {_key(key): _held(one, inside) for key, one in value.items()}
        return [_held(one, inside) for one in value]
    try:
        plain = value if value is None or isinstance(value, (str, int, float)) else _plain(value)
        json.dumps(plain)
    except Exception:  # noqa: BLE001 - as in `encode`
        return _text(value)
    return plain


def _key(key: Any) -> str | float | None:
    held: Any = _held(key)
    return held if held is None or isinstance(held, (str, int, float)) else _text(key)


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - as in `encode`
        return f"<{type(value).__qualname__}>"


def _decode(path: Path) -> tuple[list[Record], bool]:
    """The records, and whether the file is a whole JSON array."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(path.read_bytes())  # a character may be cut at the end
    except UnicodeDecodeError as error:
        raise JournalError(f"{path} is no journal: it is not text ({error}).") from error
    if not text.strip(_BLANK):
        return [], False
    if not text.lstrip().startswith("["):
        raise JournalError(f"{path} is no journal: it begins with {text[:20]!r} instead of '['.")
    try:
        records, is_complete = json.loads(text), True
    except json.JSONDecodeError:
        records, is_complete = _decode_one_by_one(text.strip(_BLANK), path), False
    if not all(isinstance(record, dict) for record in records):
        raise JournalError(f"{path} is no journal: its array holds other things than objects.")
    return records, is_complete


def _decode_one_by_one(text: str, path: Path) -> list[Any]:
    """Records up to the end of `text` or up to a last record that was cut short."""
    decoder = json.JSONDecoder()
    records: list[Any] = []
    position = len(text) - len(text[1:].lstrip(_BLANK))
    while position < len(text):
        if text[position] == "]":
            if text[position + 1 :].strip(_BLANK):
                raise JournalError(f"{path} is damaged: something follows the closing ']' at character {position}.")
            break
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if not _CUT_TOKEN.match(text, error.pos):  # a record may be left out only at the end of the text
                raise JournalError(f"{path} is damaged at character {error.pos}: {error.msg}.") from error
            break
        records.append(record)
        separator = _SEPARATOR.match(text, position)
        assert separator is not None
        position = separator.end()
        if position < len(text) and text[position] != "]" and not separator[1]:
            raise JournalError(f"{path} is damaged: a ',' is missing at character {position}.")
    return records


def _step_of(record: Record) -> float:
    step = record.get("global_step")
    return step if isinstance(step, (int, float)) else 0


def _replace(path: Path, records: list[Record]) -> None:
    """Write a whole journal in one atomic step."""
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
        is_free = True  # a file system without locks (some network mounts): nothing tells two writers apart there
    if not is_free:
        os.close(descriptor)
        raise JournalHeldError(
            f"{path} is being written by another live run; give this run a folder of its own, or end the other one."
        )
    return descriptor


def _rename_aside(path: Path, label: str) -> Path:
    name = _free_name(path, label)
    os.replace(path, name)
    return name


def _free_name(path: Path, label: str) -> Path:
    """A name like ``<name>.<label><n>.json`` that nothing had; something empty reserves it against other processes."""
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
