"""Reads logs of runs in any supported format, recovering damaged ones."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onstep.analysis.logs.columns import MAX_KEYS
from onstep.analysis.logs.lines import BLANK, MAX_LINE_BYTES, FileSource
from onstep.analysis.logs.record_file import BYTE_ORDER_MARK, RecordFile, decoded
from onstep.errors import DataError
from onstep.files.bounded_reading import MAX_JSON_BYTES, check_nesting
from onstep.record import Record

_HEAD_BYTES = 1 << 16
_MOST_WHOLE_BYTES = MAX_JSON_BYTES
"""Maximum size of a file that is not read line by line, since it is decoded as a whole."""
_MOST_OBJECTS = 1_000_000
"""The same for its number of objects and lists, which take many times their size in the file."""
_HISTORY = "log_history"
"""Key of the records in the trainer_state.json of Hugging Face's Trainer."""
_STEP, _FOREIGN_STEP = "global_step", "step"
_RECORD_KEYS = (_STEP, _FOREIGN_STEP, "loss", "train_loss", "eval_loss")
"""A single object with one of these keys is a record."""
_REMEDY = "pass the trainer_logs.json of a run, JSON lines, or the trainer_state.json of Hugging Face's Trainer."
_BINARY = re.compile(rb"[\x00-\x08\x0e-\x1f\x7f]")


def read_log(path: Path, source: FileSource | None = None) -> tuple[Sequence[Record], list[str]]:
    """Read the records of a log, with notes on what had to be recovered.

    Args:
        source: the log, if it is open already.

    Raises:
        DataError: if the file does not contain records.
    """
    if path.is_dir():
        raise DataError(f"{path} is a directory, not a log; to read the log in it, use TrainingLog.from_run_dir.")
    source = source or FileSource(path)
    head = source.read(0, _HEAD_BYTES)
    if not head.strip(BLANK) and source.is_blank():
        return [], ["the file is empty: nothing has been logged yet"]
    _require_json(path, head)
    if not _has_record_a_line(source):
        return _read_whole(path, source)
    records = RecordFile(source)
    if records.num_long_lines and not len(records):
        raise DataError(_too_large(path, source))
    return records, [*_notes(records), *records.notes]


def _too_large(path: Path, source: FileSource) -> str:
    return (
        f"{path} has {source.size:,} bytes, and a file without a record of at most {MAX_LINE_BYTES:,} bytes on each "
        f"line is read up to {_MOST_WHOLE_BYTES:,}; write one record per line, or {_REMEDY}"
    )


def _require_json(path: Path, head: bytes) -> None:
    """Reject files that cannot be JSON before reading much of them."""
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(BLANK)
    if text[:1] in (b"[", b"{"):
        return
    kind = ""
    if "tfevents" in path.name:
        kind = "; it is a TensorBoard event file, to be viewed with `tensorboard --logdir`"
    elif _BINARY.search(text):
        kind = "; it is a binary file"
    raise DataError(f"Invalid JSON in log file: {path}: it begins with {_shown(text)} instead of '['{kind}; {_REMEDY}")


def _has_record_a_line(source: FileSource) -> bool:
    """Whether the first line with a brace is a complete record with the keys of a metrics log.

    A file that is too large to be decoded as a whole is also read line by line if its first line is too long.
    """
    head, size = b"", _HEAD_BYTES
    while len(head) < source.size and head.strip(BLANK + b"[").count(b"\n") == 0:
        if len(head) > MAX_LINE_BYTES:
            return source.size > _MOST_WHOLE_BYTES
        head, size = source.read(0, size), size * 4
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip(BLANK)
    record = decoded(text.lstrip(BLANK + b"[").partition(b"\n")[0].rstrip(BLANK + b",]"))
    if not isinstance(record, dict) or _HISTORY in record or (_FOREIGN_STEP in record and _STEP not in record):
        return False
    return text.startswith(b"[") or any(key in record for key in _RECORD_KEYS)


def _notes(records: RecordFile) -> list[str]:
    """Notes on damaged or missing parts of a file."""
    notes = []
    recovered = f"Recovered {len(records)} records"
    cut = records.bad_lines[-1] if records.is_cut_short and records.num_bad_lines == len(records.bad_lines) else None
    within = [bad for bad in records.bad_lines if bad is not cut]
    if within:
        shown = _listed(
            [f"{bad.number} ({_shown(bad.text)} at byte {bad.offset})" for bad in within],
            records.num_bad_lines - (cut is not None),
        )
        notes.append(f"{recovered}; skipped damaged lines: {shown}")
    if cut is not None:
        notes.append(f"{recovered}; the last one is truncated at byte {cut.offset} and was skipped")
    if records.long_lines:
        shown = _listed(
            [f"{line.number} (at byte {line.offset})" for line in records.long_lines], records.num_long_lines
        )
        notes.append(f"{recovered}; skipped lines of more than {MAX_LINE_BYTES:,} bytes: {shown}")
    if records.columns.has_more_keys:
        notes.append(
            f"the records have more than {MAX_KEYS:,} different keys: those that appear after the first {MAX_KEYS:,} "
            "are not summarized, plotted or exported"
        )
    if cut is None and records.is_opened and not records.is_closed:
        notes.append(f"{recovered}; the closing ']' is missing: the writer is still running, or was killed")
    return notes


def _listed(names: Sequence[str], num: int) -> str:
    """The first three of `num` names."""
    more = num - len(names[:3])
    return ", ".join(names[:3]) + (f" and {more} more" if more else "")


def _read_whole(path: Path, source: FileSource) -> tuple[list[Record], list[str]]:
    """The records of a file in another layout (indented, all on one line, another program's), with notes."""
    if source.size > _MOST_WHOLE_BYTES:
        raise DataError(_too_large(path, source))
    data = source.read(0, source.size)
    num_objects = data.count(b"{") + data.count(b"[")
    if num_objects > _MOST_OBJECTS:
        raise DataError(
            f"{path} has {num_objects:,} objects and lists, and a file without one record per line is read up to "
            f"{_MOST_OBJECTS:,}; write one record per line, or {_REMEDY}"
        )
    text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8", errors="replace")
    del data
    content, notes = _content(path, text.strip(BLANK.decode()))
    num_entries = len(content)
    content[:] = [entry for entry in content if isinstance(entry, dict)]
    if len(content) < num_entries:
        if not content:
            raise DataError(f"{path} must contain a JSON array of records (objects); {_REMEDY}")
        notes.append(f"Recovered {len(content)} records; skipped {num_entries - len(content)} other entries")
    if any(_FOREIGN_STEP in record for record in content) and not any(_STEP in record for record in content):
        notes.append("the log was written by another program: its 'step' is read as 'global_step'")
        for row, record in enumerate(content):  # one by one, to avoid holding all of them in memory twice
            if _FOREIGN_STEP in record:
                content[row] = {_STEP: record[_FOREIGN_STEP], **record}
    return content, notes


def _content(path: Path, text: str) -> tuple[list[Any], list[str]]:
    """The entries of the file's array, with notes."""
    try:
        content = json.loads(text)
        check_nesting(content)
    except (ValueError, RecursionError) as error:
        return _recovered(path, text, error)
    if isinstance(content, dict) and isinstance(content.get(_HISTORY), list):
        return content[_HISTORY], []
    if isinstance(content, dict) and any(key in content for key in _RECORD_KEYS):
        return [content], []
    if not isinstance(content, list):
        raise DataError(f"Log file must contain a JSON array: {path} contains an object with other keys; {_REMEDY}")
    return content, []


def _recovered(path: Path, text: str, error: Exception) -> tuple[list[Any], list[str]]:
    """Recover records from invalid JSON: consecutive objects first, then complete lines."""
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
        rest = "" if end == len(text) else f"; nothing could be read from character {end} on ({_shown(text[end:])})"
        return entries, [f"Recovered {len(entries)} records{rest or '; the file is damaged'}"]
    if re.match(r'\[\s*(\{\s*("[^\n]*)?)?\Z', text):
        return [], ["Recovered 0 records; the first one is truncated: the writer is still running, or was killed"]
    raise DataError(f"Invalid JSON in log file: {path}: {error}, and no record could be recovered; {_REMEDY}") from None


def _entries(text: str, position: int) -> tuple[list[Any], int]:
    """Parse consecutive objects from `position` on; also returns the position after the last one."""
    decoder = json.JSONDecoder()
    entries: list[Any] = []
    separator = re.compile(r"[\s,\x00]*")
    while True:
        match = separator.match(text, position)
        position = position if match is None else match.end()
        if text[position : position + 1] != "{":
            return entries, position
        try:
            entry, end = decoder.raw_decode(text, position)
            check_nesting(entry)
        except (ValueError, RecursionError):
            return entries, position
        entries.append(entry)
        position = end


def _shown(text: str | bytes) -> str:
    shown = text if isinstance(text, str) else text.decode("utf-8", errors="replace")
    return repr(shown[:30])
