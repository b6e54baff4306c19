"""Reads the log of a run in whatever form and state it is, with notes on what could not be read; or only its end."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onstep.analysis.logs.record_file import BLANK, BYTE_ORDER_MARK, FileSource, RecordFile, decoded
from onstep.errors import DataError
from onstep.metrics_log import Record

_HEAD_BYTES = 1 << 16
_HISTORY = "log_history"
"""Where the Trainer of Hugging Face keeps its records, in trainer_state.json."""
_STEP, _FOREIGN_STEP = "global_step", "step"
_RECORD_KEYS = (_STEP, _FOREIGN_STEP, "loss", "train_loss", "eval_loss")
"""A single object with one of them is a record."""
_REMEDY = "give the trainer_logs.json of a run, JSON lines, or the trainer_state.json of Hugging Face's Trainer."
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")


def read_log(path: Path) -> tuple[Sequence[Record], list[str]]:
    """The records of a log, and what had to be recovered, in words.

    Raises:
        DataError: when the file holds no records.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a log; TrainingLog.from_run_dir reads the log in it.")
    source = FileSource(path)
    head = source.read(0, _HEAD_BYTES)
    if not head.strip(BLANK) and not source.read(_HEAD_BYTES, source.size).strip(BLANK):
        return [], ["the file is empty: nothing was logged yet"]
    _require_json(path, head)
    if not _has_record_a_line(source):
        return _read_whole(path, source)
    records = RecordFile(source)
    return records, [*_notes(records), *records.notes]


def _require_json(path: Path, head: bytes) -> None:
    """Refuse what cannot be JSON before much of it is read."""
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(BLANK)
    if text[:1] in (b"[", b"{"):
        return
    kind = ""
    if "tfevents" in path.name:
        kind = "; it is TensorBoard's event file, which `tensorboard --logdir` shows"
    elif _BINARY.search(text):
        kind = "; it is a binary file"
    raise DataError(f"Invalid JSON in log file: {path}: it begins with {_shown(text)} instead of '['{kind}; {_REMEDY}")


def _has_record_a_line(source: FileSource) -> bool:
    """Whether the first line with a brace is a whole record, whose step has the key that it has in a journal."""
    head, size = b"", _HEAD_BYTES
    while len(head) < source.size and head.strip(BLANK + b"[").count(b"\n") == 0:
        head, size = source.read(0, size), size * 4
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(BLANK)
    record = decoded(text.lstrip(BLANK + b"[").partition(b"\n")[0].rstrip(BLANK + b",]"))
    if not isinstance(record, dict) or _HISTORY in record or (_FOREIGN_STEP in record and _STEP not in record):
        return False
    return text.startswith(b"[") or any(key in record for key in _RECORD_KEYS)


def _notes(records: RecordFile) -> list[str]:
    """What is not as it should be in the lines of a file."""
    notes = []
    recovered = f"Recovered {len(records)} records"
    cut = records.bad_lines[-1] if records.is_cut_short and records.num_bad_lines == len(records.bad_lines) else None
    within = [bad for bad in records.bad_lines if bad is not cut]
    if within:
        shown = ", ".join(f"{bad.number} ({_shown(bad.text)} at byte {bad.offset})" for bad in within[:3])
        more = records.num_bad_lines - (cut is not None) - len(within[:3])
        notes.append(f"{recovered}; damaged lines were left out: {shown}" + (f" and {more} more" if more else ""))
    if cut is not None:
        notes.append(f"{recovered}; the last one is cut short at byte {cut.offset} and was left out")
    elif records.is_opened and not records.is_closed:
        notes.append(f"{recovered}; the closing ']' is missing: the writer is at work, or was killed")
    return notes


def _read_whole(path: Path, source: FileSource) -> tuple[list[Record], list[str]]:
    """The records of a file of another layout (indented, all on one line, another program's), and notes."""
    text = source.read(0, source.size).removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace")
    content, notes = _content(path, text.strip(BLANK.decode()))
    num_entries = len(content)
    content[:] = [entry for entry in content if isinstance(entry, dict)]
    if len(content) < num_entries:
        if not content:
            raise DataError(f"{path} must contain a JSON array of records (objects); {_REMEDY}")
        notes.append(f"Recovered {len(content)} records; {num_entries - len(content)} entries that are none left out")
    if any(_FOREIGN_STEP in record for record in content) and not any(_STEP in record for record in content):
        notes.append("the log is another program's: its 'step' is read as 'global_step'")
        for row, record in enumerate(content):  # one by one, so that not all of them are in memory twice
            if _FOREIGN_STEP in record:
                content[row] = {_STEP: record[_FOREIGN_STEP], **record}
    return content, notes


def _content(path: Path, text: str) -> tuple[list[Any], list[str]]:
    """The entries of the file's array, and notes."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _recovered(path, text, error)
    if isinstance(content, dict) and isinstance(content.get(_HISTORY), list):
        return content[_HISTORY], []
    if isinstance(content, dict) and any(key in content for key in _RECORD_KEYS):
        return [content], []
    if not isinstance(content, list):
        raise DataError(f"Log file must contain a JSON array: {path} holds one object of other keys; {_REMEDY}")
    return content, []


def _recovered(path: Path, text: str, error: Exception) -> tuple[list[Any], list[str]]:
    """What can be read of a text that is no JSON: objects one after another, then whole lines."""
    history = re.search(rf'"{_HISTORY}"\s*:\s*\[', text)
    begin = history.end() if history else len(text) - len(text.lstrip("[" + BLANK.decode()))
    entries, end = _entries(text, begin)
    is_over = text[end:].strip("]" + BLANK.decode()) == ""
    if is_over and entries and history is None and not text.startswith("["):
        return entries, []  # JSON lines
    if not entries or not is_over:
        by_line = [
            entry for line in text.splitlines() if isinstance(entry := decoded(line.strip(" \t,[]").encode()), dict)
        ]
        entries, end = (by_line, len(text)) if len(by_line) > len(entries) else (entries, end)
    if entries:
        rest = "" if end == len(text) else f"; from character {end} on ({_shown(text[end:])}) nothing could be read"
        return entries, [f"Recovered {len(entries)} records{rest or '; the file is damaged'}"]
    if re.match(r'\[\s*(\{\s*("[^\n]*)?)?\Z', text):
        return [], ["Recovered 0 records; the first one is cut short: the writer is at work, or was killed"]
    raise DataError(f"Invalid JSON in log file: {path}: {error}, and no record could be recovered; {_REMEDY}") from None


def _entries(text: str, position: int) -> tuple[list[Any], int]:
    """The values that stand one after another from `position` on, and where the first other thing stands."""
    decoder = json.JSONDecoder()
    entries: list[Any] = []
    separator = re.compile(r"[\s,\x00]*")
    while True:
        match = separator.match(text, position)
        position = position if match is None else match.end()
        if text[position : position + 1] != "{":
            return entries, position
        try:
            entry, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            return entries, position
        entries.append(entry)


def _shown(text: str | bytes) -> str:
    shown = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
    return repr(shown[:30])


_TAIL_BYTES = 1 << 16
_PIECE_BYTES = 1 << 20


class LogTail:
    """Reads a log from its end on: `last` once, then `news` again and again.

    The log has one record a line, as a journal has; of another layout there is nothing to read. A record that is just
    being written is read when it is whole.

    Attributes:
        was_rewritten: whether the last `news` found other records in place of some that were read before, as after a
            resume or a rollback.

    Raises:
        FileNotFoundError: when there is no such file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.was_rewritten = False
        self._source = FileSource(self.path)
        self._position = 0
        """Behind the last record that was read."""

    def last(self, number: int) -> list[Record]:
        """The last records, the newest last; `news` gives those that follow."""
        size = _TAIL_BYTES
        while True:
            start = max(0, self._source.size - size)
            self._position = 0
            records = self._read(start)
            if start == 0 or len(records) > number:
                return records[max(0, len(records) - number) :]
            size *= 8

    def news(self) -> list[Record]:
        """The records that came since; where the log was cut back or begun anew, those from there on."""
        self.was_rewritten = False
        try:
            source = FileSource(self.path)
        except FileNotFoundError:  # between being set aside and being begun anew
            return []
        same = self._common_with(source)
        if same < self._position:
            self.was_rewritten = True
            self._position = same
        self._source = source
        line = source.read(0, self._position).rfind(b"\n") + 1 if self.was_rewritten else self._position
        return self._read(line)

    def _read(self, start: int) -> list[Record]:
        """The whole records in the bytes from `start` on that end behind the position."""
        records: list[Record] = []
        for line in self._source.read(start, self._source.size).split(b"\n"):
            text = line.strip(BLANK + b",[]")
            stop = start + line.find(text) + len(text)
            if stop > self._position and isinstance(record := decoded(text), dict):
                records.append(record)
                self._position = stop
            start += len(line) + 1
        return records

    def _common_with(self, source: FileSource) -> int:
        """Up to where the log is still what was read before."""
        if source.identity == self._source.identity:
            return self._position if source.size >= self._position else 0
        for start in range(0, self._position, _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, self._position)
            old, new = self._source.read(start, stop), source.read(start, stop)
            if old != new:
                differing = (at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
                return start + next(differing, min(len(old), len(new)))
        return self._position
