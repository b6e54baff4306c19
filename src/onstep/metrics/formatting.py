"""How a metric's value is shown on the console: named formats, Python formats, and lists of one value a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from onstep.errors import ConfigError

Format = str | Callable[[Any], str]
"""A Python format specification, "si", "gib", "" for what suits the type, or a callable that gives the text."""
Reduce = str | Callable[[Any], Any] | None
"""What becomes of a list: None or "max", "min", "mean", "sum", "all" (every element, joined by "/"), or a callable."""

_INTEGER_PRESENTATIONS = frozenset("doxXbn")


def format_si(value: float) -> str:
    """A count with three significant digits and the unit K, M, G, T, P or E; a plain integer below 1000."""
    scaled = float(value)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        text = f"{scaled:.3g}" if unit else f"{scaled:.0f}"
        if abs(float(text)) < 1000:  # compared as rounded: 999 999 is 1M
            return text + unit
        scaled /= 1000
    return f"{value:.3g}"


def format_gib(num_bytes: float) -> str:
    """Bytes as GiB (2**30) with three decimals."""
    return f"{num_bytes / 2**30:.3f} GiB"


_NAMED: dict[str, Callable[[float], str]] = {"si": format_si, "gib": format_gib}

_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
}


def format_value(value: Any, fmt: Format = "", reduce: Reduce = None) -> str:
    """The text for a metric's value.

    A list is reduced first. What `fmt` cannot show (None, text, a NaN where an integer is wanted) is shown as it is.

    Raises:
        ConfigError: for a `reduce` or `fmt` that does not exist.
    """
    if callable(reduce):
        return _format_scalar(reduce(value), fmt)
    if not isinstance(value, (list, tuple)):
        return _format_scalar(value, fmt)
    if reduce == "all":
        return "/".join(_format_scalar(element, fmt) for element in value)
    check_reduce(reduce)
    return _format_scalar(_REDUCTIONS[reduce or "max"](value) if value else 0, fmt)


def check_format(fmt: Format) -> None:
    """Refuse a format that no number can be shown with.

    Raises:
        ConfigError: naming it and the formats there are.
    """
    if callable(fmt) or fmt in _NAMED:
        return
    try:
        _format_scalar(1, fmt)
        _format_scalar(0.5, fmt)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"fmt must be a Python format specification, 'si', 'gib', '' or a callable, got {fmt!r} ({error})."
        ) from error


def check_reduce(reduce: Reduce) -> None:
    """Refuse a reduction that does not exist.

    Raises:
        ConfigError: naming it and the reductions there are.
    """
    if reduce is not None and not callable(reduce) and reduce != "all" and reduce not in _REDUCTIONS:
        raise ConfigError(
            f"reduce must be one of {', '.join([*_REDUCTIONS, 'all'])}, a callable or None (max), got {reduce!r}."
        )


def _format_scalar(value: Any, fmt: Format) -> str:
    if callable(fmt):
        return str(fmt(value))
    if not isinstance(value, Real):
        return str(value)
    if fmt in _NAMED:
        return _NAMED[fmt](float(value))
    if fmt:
        if fmt[-1] not in _INTEGER_PRESENTATIONS:
            return format(value, fmt)
        return format(math.trunc(value), fmt) if math.isfinite(value) else str(value)
    if isinstance(value, bool):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.4g}"
