"""The rules that one value keeps on its own, by dotted key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from onstep.config.keys import leaves
from onstep.config.part import Bound, Option, nearest
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError

PRECISIONS = {
    "bf16_mixed": "bf16_mixed",
    "bf16-mixed": "bf16_mixed",
    "fp16_mixed": "fp16_mixed",
    "fp16-mixed": "fp16_mixed",
}
"""Spellings of `mixed_precision` and the one used inside."""


OPTIONS: dict[str, Option] = {
    key: type(part).__dataclass_fields__[name].metadata["option"] for key, part, name in leaves(ConfigContainer())
}
"""What each dotted key allows, and what changing it does."""
HOLDS: dict[Bound, Callable[[float], bool]] = {
    "> 0": lambda value: value > 0,
    ">= 0": lambda value: value >= 0,
    "at least 0 and below 1": lambda value: 0 <= value < 1,
}


def check_values(values: Mapping[str, Any]) -> None:
    """Check each value of a flat configuration on its own; None is checked nowhere.

    Raises:
        ConfigError: naming the key, the value and the rule.
    """
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value) and not (OPTIONS[key].may_be_infinite and value > 0):
            raise ConfigError(f"{key}={value} must be a finite number.")
    options = {key: one for key, one in OPTIONS.items() if key in given}
    for bound, holds in HOLDS.items():
        for key in (key for key, one in options.items() if one.bound == bound and not holds(given[key])):
            raise ConfigError(f"{key}={given[key]} must be {bound}.")
    for key in (key for key, one in options.items() if one.choices and given[key] not in one.choices):
        raise not_a_choice(key, given[key], OPTIONS[key].choices)
    _check_precision(given.get("mixed_precision"))
    _check_device(given.get("dist.device"))


def not_a_choice(key: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    """The error for a value that is none of the choices; it names the nearest one."""
    hint = nearest(value, list(choices)) if isinstance(value, str) else ""
    return ConfigError(f"{key}={value!r} must be {' | '.join(choices)}.{hint}")


def parse_split(text: str) -> tuple[float, float, float]:
    """The shares of train, validation and test as fractions of 1, from text such as '90,5,5'.

    Missing shares are 0, so '100' trains on everything.

    Raises:
        ConfigError: not one to three numbers >= 0 with a sum above 0.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise ConfigError(f"dataset.split={text!r} must be the shares of train, validation and test, such as '90,5,5'.")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def _check_precision(value: str | None) -> None:
    if value is None or value in PRECISIONS:
        return
    raise ConfigError(
        f"mixed_precision={value!r} must be null (float32), 'bf16_mixed' or 'fp16_mixed'."
        f"{nearest(value, list(PRECISIONS))}"
    )


def _check_device(value: str | None) -> None:
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ConfigError(f"dist.device={value!r} must be cpu, cuda, cuda:<n>, or null for CUDA where there is one.")
