"""The rules of single values, as their fields declare them."""

from __future__ import annotations

import math

from onstep.config.field_types import coerce, field_types
from onstep.config.keys import leaves
from onstep.config.section import ConfigSection
from onstep.config.suggestions import not_a_choice, shown
from onstep.errors import ConfigError


def check_values(config: ConfigSection, prefix: str = "") -> None:
    """Check the type and the rule of each value of a configuration, or of a section whose keys start with `prefix`.

    None is allowed wherever the type includes it.

    Raises:
        ConfigError: naming the key, the value and the rule.
    """
    for key, section, name in leaves(config, prefix):
        value = coerce(getattr(section, name), field_types(type(section))[name], key)
        if value is None:
            continue
        option = section.option(name)
        if isinstance(value, float) and not math.isfinite(value) and not (option.may_be_infinite and value > 0):
            raise ConfigError(f"{key}={value} must be a finite number.")
        if option.bound is not None and not option.bound.holds(value):
            raise ConfigError(f"{key}={shown(value)} must be {option.bound.text}.")
        if option.choices and value not in option.choices and value not in option.spellings:
            raise not_a_choice(key, value, option.choices)


def check_alone(section: ConfigSection, prefix: str) -> None:
    """Refuse a changed value that has no meaning with another value of its section (`Option.only_with`).

    Raises:
        ConfigError: naming both values and the remedy.
    """
    for name, value in section.changed().items():
        only_with = section.option(name).only_with
        if only_with is None:
            continue
        other, allowed = only_with
        chosen = getattr(section, other)
        if chosen not in allowed:
            raise ConfigError(
                f"{prefix}{name}={shown(value)} has no effect with {prefix}{other}={chosen}; set {prefix}{other} to "
                f"{' or '.join(allowed)}, or leave {name} at its default {getattr(type(section)(), name)!r}."
            )
