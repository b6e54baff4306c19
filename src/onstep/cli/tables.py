"""Sizes, dates and numbers for a terminal."""

from __future__ import annotations

from datetime import datetime

from onstep.analysis.text_tables import shortened
from onstep.metrics.console_table import format_si


def size_shown(num_bytes: int | None) -> str:
    """Bytes with three digits, 1 kB being 1000."""
    if num_bytes is None:
        return "-"
    text = format_si(num_bytes)
    return f"{text[:-1]} {text[-1].replace('K', 'k')}B" if text[-1].isalpha() else f"{text} B"


def date_shown(iso: str) -> str:
    """A time in the zone of this machine, to the minute; as it is where it is no ISO 8601."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError):
        return shortened(iso, 16)


def number_shown(value: float | None) -> str:
    """Three significant digits."""
    return "-" if value is None else f"{value:.3g}"


def metric_shown(value: float) -> str:
    """Four significant digits, so that a column of them can be compared."""
    return f"{value:#.4g}".rstrip(".")


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
