"""Names in error messages: the nearest known one, the first of many, and the choices of a key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from onstep.errors import ConfigError


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean 'x'?' for the known name nearest to `name`, or '' when none is near."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def not_a_choice(key: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    """The error for a value that is not among the choices; it names the nearest one."""
    hint = nearest(value, list(choices)) if isinstance(value, str) else ""
    return ConfigError(f"{key}={value!r} must be {' | '.join(choices)}.{hint}")
