"""The base of every configuration dataclass: a mistyped key is an error that names the nearest one."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import Any

from onstep.errors import ConfigError


def nearest(name: str, known: list[str]) -> str:
    """' Did you mean 'x'?' for the known name nearest to `name`, or '' when none is near."""
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {matches[0]!r}?" if matches else ""


@dataclass
class ConfigPart:
    """A dataclass whose attributes are its fields and nothing else."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if name not in known:
            hint = nearest(name, list(known))
            raise ConfigError(f"{type(self).__name__} has no field {name!r}.{hint} Its fields: {', '.join(known)}.")
        object.__setattr__(self, name, value)

    def validate(self) -> None:
        """Check the values of this part on their own.

        Raises:
            ConfigError: naming the value, the rule and the remedy.
        """

    def field_names(self) -> list[str]:
        """The names of the fields, in order."""
        return [f.name for f in fields(self)]
