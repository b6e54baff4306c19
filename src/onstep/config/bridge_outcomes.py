"""Gives the outcome of each key of Megatron Bridge: an effect, a neutral value, or a refusal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal

from onstep.config.bridge.rules import Rule
from onstep.config.bridge.table import RULES, SECTIONS
from onstep.config.container import ConfigContainer
from onstep.config.keys import KEYS
from onstep.errors import ConfigError


@dataclass(frozen=True)
class Outcome:
    """The outcome of a key with a value."""

    kind: Literal["effect", "neutral", "refused"]
    text: str
    """The keys that it sets, why it changes nothing, or the error."""


def rules() -> Iterator[tuple[str, Rule]]:
    """Every key of Bridge that is not Onstep's, by its dotted name, with its rule."""
    for kind, section in SECTIONS.items():
        for name, rule in RULES[kind].items():
            yield f"{section}.{name}" if section else name, rule


def outcome(key: str, value: Any) -> Outcome:
    """The outcome of a dotted key with a value of Bridge.

    Raises:
        KeyError: for a key that Bridge does not have.
    """
    if key in KEYS or key in {one.name for one in fields(ConfigContainer)}:
        return Outcome("effect", key)
    rule = dict(rules())[key]
    try:
        rule.check(key, value)
    except ConfigError as error:
        return Outcome("refused", str(error))
    return Outcome("effect", ", ".join(rule.becomes)) if rule.becomes else Outcome("neutral", rule.why)
