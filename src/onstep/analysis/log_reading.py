"""Reads the log of a run, in whatever form and state it is: what can be read is read, and notes say what was not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from onstep.analysis.line_index import BYTE_ORDER_MARK, LineIndex
from onstep.analysis.record_file import FileSource, MemorySource, RecordFile
from onstep.errors import DataError
from onstep.journal import Record

_BLANK = b" \t\r\n\x00"
_HEAD_BYTES = 1 << 16
_HISTORY = "log_history"
"""Where the Trainer of Hugging Face keeps its records, in trainer_state.json."""
_STEP, _FOREIGN_STEP = "global_step", "step"
_RECORD_KEYS = (_STEP, _FOREIGN_STEP, "loss", "train_loss", "eval_loss")
"""A single object with one of them is a record."""
_REMEDY = "give the trainer_logs.json of a run, JSON lines, or the trainer_state.json of Hugging Face's Trainer."
_IS_FOREIGN = "the log is another program's: its 'step' is read as 'global_step'"
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")


def read_log(path: Path) -> RecordFile:
    """The records of a log, with `notes` of what had to be recovered.

    Raises:
        DataError: when the file holds no records.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder, not a log; TrainingLog.from_run_dir reads the log in it.")
    source = FileSource(path)
    head = source.read(0, _HEAD_BYTES)
    if not head.strip(_BLANK) and not source.read(_HEAD_BYTES, source.size).strip(_BLANK):
        return _in_memory(path, [], ["the file is empty: nothing was logged yet"])
    _require_json(path, head)
    if not _has_record_a_line(source):
        return _in_memory(path, *_read_whole(path, source))
    records = RecordFile(source)
    records.notes += _notes(records.line_index)
    return records


def _in_memory(path: Path, records: list[Record], notes: list[str]) -> RecordFile:
    """Records laid out by lines, so that their columns are read as those of any log; `records` is emptied."""
    lines, gone = bytearray(), Record()
    for row, record in enumerate(records):
        lines += json.dumps(_with_step(record) if _IS_FOREIGN in notes else record).encode("ascii") + b"\n"
        records[row] = gone  # so that not all of them are in memory twice
    records.clear()
    in_lines = RecordFile(MemorySource(str(path), lines))
    in_lines.notes += notes
    return in_lines


def _require_json(path: Path, head: bytes) -> None:
    """Refuse what cannot be JSON before much of it is read."""
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(_BLANK)
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
    while len(head) < source.size and head.strip(_BLANK + b"[").count(b"\n") == 0:
        head, size = source.read(0, size), size * 4
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(_BLANK)
    record = _decoded(text.lstrip(_BLANK + b"[").partition(b"\n")[0].rstrip(_BLANK + b",]"))
    if not isinstance(record, dict) or _HISTORY in record or (_FOREIGN_STEP in record and _STEP not in record):
        return False
    return text.startswith(b"[") or any(key in record for key in _RECORD_KEYS)


def _notes(index: LineIndex) -> list[str]:
    """What is not as it should be in a file with one record a line."""
    notes = []
    recovered = f"Recovered {len(index.starts)} records"
    cut = index.bad_lines[-1] if index.is_cut_short and index.num_bad_lines == len(index.bad_lines) else None
    within = [bad for bad in index.bad_lines if bad is not cut]
    if within:
        shown = ", ".join(f"{bad.number} ({_shown(bad.text)} at byte {bad.offset})" for bad in within[:3])
        more = index.num_bad_lines - (cut is not None) - len(within[:3])
        notes.append(f"{recovered}; damaged lines were left out: {shown}" + (f" and {more} more" if more else ""))
    if cut is not None:
        notes.append(f"{recovered}; the last one is cut short at byte {cut.offset} and was left out")
    elif index.is_opened and not index.is_closed:
        notes.append(f"{recovered}; the closing ']' is missing: the writer is at work, or was killed")
    return notes


def _read_whole(path: Path, source: FileSource) -> tuple[list[Record], list[str]]:
    """The records of a file of another layout (indented, all on one line, another program's), and notes."""
    content, notes = _content(path, _text_of(source))
    num_entries = len(content)
    content[:] = [entry for entry in content if isinstance(entry, dict)]
    if len(content) < num_entries:
        if not content:
            raise DataError(f"{path} must contain a JSON array of records (objects); {_REMEDY}")
        notes.append(f"Recovered {len(content)} records; {num_entries - len(content)} entries that are none left out")
    if any(_FOREIGN_STEP in record for record in content) and not any(_STEP in record for record in content):
        notes.append(_IS_FOREIGN)
    return content, notes


def _text_of(source: FileSource) -> str:
    data = source.read(0, source.size)
    return data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace").strip(_BLANK.decode())


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
    begin = history.end() if history else len(text) - len(text.lstrip("[" + _BLANK.decode()))
    entries, end = _entries(text, begin)
    is_over = text[end:].strip("]" + _BLANK.decode()) == ""
    if is_over and entries and history is None and not text.startswith("["):
        return entries, []  # JSON lines
    if not entries or not is_over:
        by_line = [entry for line in text.splitlines() if isinstance(entry := _decoded(line.strip(" \t,[]")), dict)]
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


def _with_step(record: Record) -> Record:
    return {_STEP: record[_FOREIGN_STEP], **record} if _FOREIGN_STEP in record else record


def _decoded(text: str | bytes) -> Any:
    try:
        return json.loads(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


def _shown(text: str | bytes) -> str:
    shown = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
    return repr(shown[:30])
