"""Rules of Megatron Bridge's keys that are not Onstep's: each sets another key, or has values that are neutral."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from onstep.config.bridge.values import comparable
from onstep.config.suggestions import shown
from onstep.errors import ConfigError


@dataclass(frozen=True)
class Either:
    """Several neutral values, of which the first is Bridge's default."""

    values: tuple[Any, ...]

    @classmethod
    def of(cls, *values: Any) -> Either:
        """The values."""
        return cls(values)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One key of Megatron Bridge."""

    default: Any
    """What it is read as until it is set."""
    accepts: tuple[Any, ...] | None
    """The neutral values; None is every value."""
    why: str
    """Why a neutral value changes nothing here, or what another value would ask for."""
    remedy: str = ""
    """What to do instead of another value."""
    becomes: tuple[str, ...] = ()
    """The keys that it sets, for a key with an effect."""
    apply: Callable[[Any, Any], None] | None = None
    """Sets them, in the configuration that is the first argument, to what the value means."""
    read: Callable[[Any], Any] | None = None
    """Its value in a configuration."""

    @property
    def status(self) -> str:
        """`effect` or `neutral`."""
        return "effect" if self.becomes else "neutral"

    @property
    def written(self) -> list[str]:
        """The neutral values as YAML has them; none for a key that accepts every value."""
        return [_written(value) for value in self.accepts or ()]

    def takes(self, value: Any) -> bool:
        """Whether a value is accepted."""
        given = comparable(value)
        return self.accepts is None or any(type(given) is type(one) and given == one for one in self.accepts)

    def check(self, key: str, value: Any) -> None:
        """Refuse a value that is not accepted.

        Raises:
            ConfigError: naming what it would be, and the remedy.
        """
        if not self.takes(value):
            accepted = " or ".join(self.written)
            remedy = f"; {self.remedy}" if self.remedy else ""
            raise ConfigError(f"{key}={shown(comparable(value))} must be {accepted}: {self.why}{remedy}.")


def neutral(why: str, remedy: str, keys: Mapping[str, Any]) -> dict[str, Rule]:
    """Rules of keys with the only values that Onstep accepts.

    Args:
        why: what another value asks for, as the end of a sentence.
        remedy: what to do instead.
        keys: each with its neutral value, or `Either` of several.
    """
    rules = {}
    for name, value in keys.items():
        values = value.values if isinstance(value, Either) else (value,)
        rules[name] = Rule(default=values[0], accepts=values, why=why, remedy=remedy)
    return rules


def each_by_name(remedy: str, keys: Mapping[str, tuple[Any, str]]) -> dict[str, Rule]:
    """Rules of keys with their neutral values, each with what another value asks for, which is not supported."""
    rules: dict[str, Rule] = {}
    for name, (value, what) in keys.items():
        rules |= neutral(f"{what} is not supported", remedy, {name: value})
    return rules


def without_effect(why: str, keys: Mapping[str, Any]) -> dict[str, Rule]:
    """Rules of keys whose every value is accepted, since it changes nothing here.

    Args:
        why: the reason.
        keys: each with Bridge's default.
    """
    return {name: Rule(default=value, accepts=None, why=why) for name, value in keys.items()}


def _written(value: Any) -> str:
    """As YAML has it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list) else str(value)
