"""Formats sizes, dates and numbers for a terminal."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from onstep.analysis.text_tables import shortened
from onstep.console.formats import format_si


def size_shown(num_bytes: int | None) -> str:
    """Bytes with three significant digits; 1 kB is 1000 bytes."""
    if num_bytes is None:
        return "-"
    text = format_si(num_bytes)
    return f"{text[:-1]} {text[-1].replace('K', 'k')}B" if text[-1].isalpha() else f"{text} B"


def date_shown(iso: str) -> str:
    """A time in the local time zone, to the minute; text that is not ISO 8601 is returned unchanged."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return shortened(iso, 16)


def time_shown(timestamp: Any) -> str | None:
    """A time in Unix seconds, in the local time zone, to the second; None for anything else."""
    try:
        return f"{datetime.fromtimestamp(timestamp):%Y-%m-%d %H:%M:%S}"
    except (TypeError, ValueError, OverflowError, OSError):
        return None


def number_shown(value: float | None) -> str:
    """Three significant digits."""
    return "-" if value is None else f"{value:.3g}"


def metric_shown(value: float) -> str:
    """Four significant digits, keeping trailing zeros so that a column lines up."""
    return f"{value:#.4g}".rstrip(".")


def value_shown(value: Any, most: int) -> str:
    """Any value of a record: six significant digits of a number, at most so many letters of anything else."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return shortened(value if isinstance(value, str) else json.dumps(value), most)


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
