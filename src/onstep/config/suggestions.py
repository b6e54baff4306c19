"""Names in error messages: the nearest known one, the first of many, and the choices of a key."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError

WIDTH = 200
"""Letters of a value in an error message; names longer than this are like no other."""


def shown(value: Any) -> str:
    """The `repr` of a value for an error message, without the end of a long one."""
    try:
        text = repr(value)
    except ValueError:  # it contains an integer that Python does not write out
        return f"{type(value).__name__} with more than {sys.get_int_max_str_digits():,} digits"
    return text if len(text) <= WIDTH else f"{text[:WIDTH]}... ({len(text):,} characters)"


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """' Did you mean 'x'?' for the known name nearest to `name`, or '' when none is nearer than `cutoff` (0 to 1)."""
    if len(name) > WIDTH:
        return ""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f" Did you mean {matches[0]!r}?" if matches else ""


def nearest_path(path: str) -> str:
    """' Did you mean 'data/pile'?' for the existing path that differs from a missing one in one name, or ''."""
    given = Path(os.path.expanduser(path))
    missing = next((one for one in (given, *given.parents) if one.parent.is_dir()), given)
    try:
        names = os.listdir(missing.parent)
    except OSError:  # it cannot be listed
        return ""
    rest = given.relative_to(missing)
    near = [name for name in names if not name.startswith(".") and (missing.parent / name / rest).exists()]
    matches = difflib.get_close_matches(missing.name, near, n=1, cutoff=0.6)
    return f" Did you mean {str(missing.parent / matches[0] / rest)!r}?" if matches else ""


def listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def not_a_choice(key: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    """The error for a value that is not among the choices; it names the nearest one."""
    hint = nearest(value, list(choices)) if isinstance(value, str) else ""
    return ConfigError(f"{key}={shown(value)} must be {' | '.join(choices)}.{hint}")
