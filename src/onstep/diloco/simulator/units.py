"""Durations, bytes and shares as people read them."""

from __future__ import annotations

_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"))
_BYTES = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def duration_text(seconds: float) -> str:
    """Seconds in the largest unit of which there are at least two: `75.0 s`, `2.1 min`, `47.9 h`, `2.0 d`."""
    for size, unit in _TIMES:
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def bytes_text(count: float) -> str:
    """Bytes in the largest decimal unit of which there is at least one: `950 B`, `1.5 MB`."""
    for size, unit in _BYTES:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def percent_text(share: float) -> str:
    """A share in percent: `97.3 %`."""
    return f"{100 * share:.1f} %"
