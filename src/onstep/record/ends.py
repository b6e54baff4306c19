"""Reads the first and the last records of a metrics log, and nothing between: a long log is continued at its end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

from onstep.record.forms import Form

_BETWEEN = b", \t\r\n\x00"
_FARTHEST = 64 << 20
_BLOCK = 1 << 16
"""Bytes of the first read; each further one doubles what has been read."""


def ends_of(
    descriptor: int, num_bytes: int, most: int, form: Form
) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """The first record of an open file, and its last ones up to byte `num_bytes`, oldest first.

    Args:
        num_bytes: where the last record ends.
        most: maximum number of last records.

    Returns:
        None if no record ends there, or if the file does not have one record per line.
    """
    opening, comma = form.opening + form.before_first, form.between.removesuffix(b"\n")
    if os.fstat(descriptor).st_size < num_bytes or os.pread(descriptor, len(opening), 0) != opening:
        return None
    lines = _last_lines(descriptor, len(opening), num_bytes, most)
    if not lines or not all(line.endswith(comma) for line in lines[:-1]):
        return None
    try:
        first = json.loads(_first_line(descriptor, len(opening), num_bytes).removesuffix(comma))
        last = [json.loads(line.removesuffix(comma)) for line in lines]
    except (ValueError, RecursionError):
        return None
    return (first, last) if all(isinstance(one, dict) for one in (first, *last)) else None


def end_of_record(descriptor: int, order: Callable[[dict[str, Any]], int]) -> int | None:
    """Where a record of an open metrics log ends, searched for from the end of the file.

    Args:
        order: 0 for the record, 1 for one that follows it, and -1 for one that precedes it, where the search ends.

    Returns:
        None if there are none or several, or if it is not within the last 64 MiB.
    """
    size, found = os.fstat(descriptor).st_size, []
    for offset, line in _lines_backwards(descriptor, size):
        text = line.rstrip(_BETWEEN)
        try:
            record = json.loads(text) if text.startswith(b"{") else None
        except (ValueError, RecursionError):
            record = None
        place = order(record) if isinstance(record, dict) else 1
        if place == 0:
            found.append(offset + len(text))
        if place < 0 or len(found) > 1 or size - offset > _FARTHEST:
            break
    return found[0] if len(found) == 1 else None


def end_of_body(descriptor: int, form: Form) -> tuple[int, bool]:
    """Where the closing of a complete file may be overwritten, and whether there are records before."""
    size, bracket = os.fstat(descriptor).st_size, form.closing.strip()
    length, body = 0, b""
    while not body and length < size:
        length = min(max(_BLOCK, 2 * length), size)
        body = os.pread(descriptor, length, size - length).rstrip().removesuffix(bracket).rstrip()
    return size - length + len(body), bool(body) and not (form.opening and body.endswith(form.opening))


def _lines_backwards(descriptor: int, end: int) -> Iterator[tuple[int, bytes]]:
    """The lines before `end`, the last one first, each with its offset."""
    rest, start = b"", end
    while start > 0:
        length = min(max(_BLOCK, len(rest)), start)
        start -= length
        rest = os.pread(descriptor, length, start) + rest
        offset = start + len(rest)
        rest, *lines = rest.split(b"\n")
        for line in reversed(lines):
            offset -= len(line)
            yield offset, line
            offset -= 1
    yield 0, rest


def _first_line(descriptor: int, start: int, end: int) -> bytes:
    """The line that begins at `start`."""
    content = b""
    while b"\n" not in content and start < end:
        length = min(max(_BLOCK, len(content)), end - start)
        content += os.pread(descriptor, length, start)
        start += length
    return content.partition(b"\n")[0]


def _last_lines(descriptor: int, begin: int, end: int, most: int) -> list[bytes]:
    """The last lines between two offsets, at most `most`."""
    content, start = b"", end
    while start > begin and content.count(b"\n") < most:
        length = min(max(_BLOCK, len(content)), start - begin)
        start -= length
        content = os.pread(descriptor, length, start) + content
    lines = content.split(b"\n")
    return (lines if start == begin else lines[1:])[-most:]
