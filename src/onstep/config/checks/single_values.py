"""The rules of single values, as their fields declare them."""

from __future__ import annotations

import math

from onstep.config.checks.conditions import holds
from onstep.config.container import ConfigContainer
from onstep.config.field_types import coerce, field_types
from onstep.config.keys import KEYS, leaves
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


def check_alone(config: ConfigContainer) -> None:
    """Refuse a changed value that has no meaning with the value of another key (`Option.only_with`).

    Raises:
        ConfigError: naming both values and the remedy.
    """
    for name, key in KEYS.items():
        value, only_with = key.get(config), key.option.only_with
        if only_with and value != key.default and not holds(only_with, config):
            other, _, allowed = only_with.partition("=")
            raise ConfigError(
                f"{name}={shown(value)} has no effect with {other}={KEYS[other].get(config)}; set {other} to "
                f"{allowed}, or leave {name.rpartition('.')[2]} at its default {key.default!r}."
            )
