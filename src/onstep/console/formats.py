"""Formats the values of metrics for the console."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from operator import methodcaller
from typing import Any

from onstep.errors import ConfigError

Formatter = Callable[..., str]
"""A function of a metric's value, which may be anything."""
Format = str | Formatter
"""A Python format specification, "si", "gib", "" for a default by type, or a callable that returns the text."""
Reduce = str | Callable[..., object] | None
"""How to reduce a list: None or "max", "min", "mean", "sum", "all" (all elements, joined by "/"), or a callable."""

_INTEGER_PRESENTATIONS = frozenset("doxXbn")


def format_si(value: float) -> str:
    """Format a count with three significant digits and the unit K, M, G, T, P or E; below 1000, as a plain integer."""
    scaled = float(value)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        text = f"{scaled:.3g}" if unit else f"{scaled:.0f}"
        if abs(float(text)) < 1000:  # compared after rounding: 999,999 is 1M
            return text + unit
        scaled /= 1000
    return f"{value:.3g}"


def format_gib(num_bytes: float) -> str:
    """Format bytes as GiB (2**30) with three decimals."""
    return f"{num_bytes / 2**30:.3f} GiB"


def format_epoch(value: float) -> str:
    """Format an epoch in six characters: four decimals below 10, and as many as fit from there on."""
    return f"{value:.4f}"[:6].rstrip(".")


def format_by_type(value: object) -> str:
    """Integers with separators, other numbers with four significant digits, anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, Real)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{float(value):.4g}"


def formatter(fmt: Format = "", reduce: Reduce = None) -> Formatter:
    """A function that formats the values of a metric.

    It reduces a list first. Values that `fmt` cannot format (None, text, NaN with an integer format) are shown as is.

    Raises:
        ConfigError: for a `reduce` or `fmt` that does not exist.
    """
    text = fmt if callable(fmt) else _NAMED.get(fmt) or _by_specification(fmt)
    kinds = object if callable(fmt) else (int, float, Real)
    if not (reduce is None or callable(reduce) or reduce == "all" or reduce in _REDUCTIONS):
        raise ConfigError(
            f"reduce must be one of {', '.join([*_REDUCTIONS, 'all'])}, a callable or None (max), got {reduce!r}."
        )
    reduction = None if callable(reduce) or reduce == "all" else _REDUCTIONS[reduce or "max"]

    def formatted(value: Any) -> str:
        if reduction is not None and isinstance(value, (list, tuple)):
            value = reduction(value) if value else 0
        return str(text(value) if isinstance(value, kinds) else value)

    if callable(reduce):
        return lambda value: formatted(reduce(value))
    if reduce == "all":
        return lambda value: "/".join(map(formatted, value)) if isinstance(value, (list, tuple)) else formatted(value)
    return formatted


_NAMED: dict[str, Formatter] = {"si": format_si, "gib": format_gib, "": format_by_type}

_REDUCTIONS: dict[str, Callable[..., object]] = {
    "max": max,
    "min": min,
    "sum": sum,
    "mean": lambda values: sum(values) / len(values),
}


def _by_specification(fmt: str) -> Callable[[Any], str]:
    def of_integer(value: Any) -> str:
        return format(math.trunc(value), fmt) if math.isfinite(value) else str(value)

    formatted = of_integer if fmt[-1] in _INTEGER_PRESENTATIONS else methodcaller("__format__", fmt)
    try:
        formatted(1), formatted(0.5)
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"fmt must be a Python format specification, 'si', 'gib', '' or a callable, got {fmt!r} ({error})."
        ) from error
    return formatted
