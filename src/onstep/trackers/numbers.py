"""Converts the values of metrics to numbers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import Any

from onstep.files.bounded_reading import brief

logger: logging.Logger = logging.getLogger(__name__)

_LARGEST = int(sys.float_info.max)


def saved_mapping(state: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A dictionary in a checkpoint's state; anything else is ignored, with a warning: {}."""
    value = state.get(key, {})
    if isinstance(value, Mapping):
        return dict(value)
    logger.warning("%s is ignored: its %s is %s, which must be a dictionary", where, key, brief(value))
    return {}


def is_step(value: Any) -> bool:
    """Whether a value can be a step: an integer from 0 to 2**63 - 1."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def plain_number(value: Any) -> int | float:
    """Convert to a built-in int or float, from subclasses (`np.float64`) and from tensors on a device too.

    An integer beyond the range of floats becomes infinite.
    """
    if not isinstance(value, int):
        return float(value)
    return int(value) if abs(value) <= _LARGEST else inf if value > 0 else -inf


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a record; the maximum of a list (one entry per rank); 0-d tensors are kept unread."""
    found = {}
    for name, value in metrics.items():
        number = value if type(value) is float else _number(value)
        if number is not None:
            found[name] = number
    return found


def read_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers; reads values that are still on a device."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            numbers[name] = plain_number(value)
        except (TypeError, ValueError):
            continue
    return numbers


def is_number(value: Any) -> bool:
    """Whether a value can be a point: a number, or a tensor with one element, which is not read."""
    return isinstance(value, (int, float)) or (hasattr(value, "__float__") and prod(getattr(value, "shape", ())) == 1)


def _number(value: Any) -> Any:
    if isinstance(value, (int, float)):
        return plain_number(value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        numbers = [one for one in map(_number, value) if one is not None]
        return max(numbers) if numbers else None
    is_scalar = hasattr(value, "__float__") and getattr(value, "ndim", 0) == 0
    return value if is_scalar else None
