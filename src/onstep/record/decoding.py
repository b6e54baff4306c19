"""Decodes the text of a metrics log up to its end or to its first damage."""

from __future__ import annotations

import codecs
import json
import re
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from onstep.record.forms import LINES, Form

_BLANK = " \t\r\n\x00"
"""White space, and the zeros that some file systems leave at the end of a file after a power failure."""
_SEPARATOR = re.compile(rf"[{_BLANK}]*(,?)[{_BLANK}]*")
_CUT_TOKEN = re.compile(r'(?:"[^\n]*|[-+.\\\w]*)\Z')
"""What can follow a decoding error at the end of a truncated text."""


@dataclass(frozen=True)
class Decoded:
    """What a text holds."""

    records: list[dict[str, Any]] = field(default_factory=list)
    """Those before the damage, if there is any."""
    is_complete: bool = False
    """Whether it is a complete JSON array."""
    damage: str | None = None
    """What is wrong before the last record; None if nothing is."""
    foreign: str | None = None
    """Why it is not a metrics log; None if it is one."""


def decode(content: bytes) -> Decoded:
    """Decode a metrics log, even one whose last record is truncated, which is skipped."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content)  # the last character may be truncated
    except UnicodeDecodeError as error:
        text = content[: error.start].decode()
        if not text.lstrip().startswith("["):
            return Decoded(foreign=f"it is not text ({error})")
        values, damage = _decode_one_by_one(text.strip(_BLANK))
        return Decoded(_leading(values), damage=damage or f": it is not text ({error})")
    if not text.strip(_BLANK):
        return Decoded()
    if not text.lstrip().startswith("["):
        return Decoded(foreign=f"it begins with {text[:20]!r} instead of '['")
    damage = None
    try:
        values, is_complete = json.loads(text), True
    except (ValueError, RecursionError):
        (values, damage), is_complete = _decode_one_by_one(text.strip(_BLANK)), False
    if damage is not None:
        return Decoded(_leading(values), damage=damage)
    if not all(isinstance(value, dict) for value in values):
        return Decoded(foreign="its array contains values other than objects")
    return Decoded(values, is_complete)


def decode_rest(content: bytes, form: Form) -> list[dict[str, Any]] | None:
    """The records that follow another one in a file; None if the content is damaged."""
    rest = content.lstrip(_BLANK.encode())
    if form is LINES:
        decoded = decode(form.array(rest) if content[:1] in (b"", b"\n") else b"x")
        return None if decoded.damage or decoded.foreign else decoded.records
    if rest[:1] not in (b"", b",", b"]"):
        return None
    decoded = decode(b"[" + rest.removeprefix(b","))
    return None if decoded.damage or decoded.foreign else decoded.records


def _leading(values: list[Any]) -> list[dict[str, Any]]:
    return list(takewhile(lambda value: isinstance(value, dict), values))


def _decode_one_by_one(text: str) -> tuple[list[Any], str | None]:
    """The values up to the end of `text`, to a truncated last one, or to what is wrong, which is named."""
    decoder = json.JSONDecoder()
    values: list[Any] = []
    position = len(text) - len(text[1:].lstrip(_BLANK))
    while position < len(text):
        if text[position] == "]":
            if text[position + 1 :].strip(_BLANK):
                return values, f": there is data after the closing ']' at character {position}"
            break
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            if not _CUT_TOKEN.match(text, error.pos):  # a record may be skipped only at the end of the text
                return values, f" at character {error.pos}: {error.msg}"
            break
        except (ValueError, RecursionError) as error:  # a number that is too long, or deep nesting
            return values, f" in record {len(values) + 1}: {error}"
        values.append(value)
        separator = _SEPARATOR.match(text, position)
        assert separator is not None
        position = separator.end()
        if position < len(text) and text[position] != "]" and not separator[1]:
            return values, f": a ',' is missing at character {position}"
    return values, None
