"""The keys of a configuration by their dotted names (`optimizer.lr`), with everything that their fields declare."""

from __future__ import annotations

import copy
import difflib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from onstep.config.bridge.precision import MixedPrecisionConfig
from onstep.config.container import ConfigContainer
from onstep.config.field_types import coerce, field_types
from onstep.config.section import ConfigSection, Option
from onstep.config.suggestions import WIDTH
from onstep.errors import ConfigError

Section = TypeVar("Section", bound=ConfigSection)

NEAR = 0.6
"""Minimum similarity (0 to 1) of a key to be suggested."""


@dataclass(frozen=True)
class Key:
    """One key of a configuration."""

    name: str
    """The dotted name."""
    annotation: Any
    """The type of the values."""
    default: Any
    """The default."""
    option: Option
    """What the field declares."""
    section: type[ConfigSection]
    """The class that has the field."""

    def get(self, config: ConfigSection) -> Any:
        """Its value in a configuration.

        Args:
            config: the configuration.
        """
        return getattr(self._holder(config), self.name.rpartition(".")[2])

    def set(self, config: ConfigSection, value: Any) -> None:
        """Set its value in a configuration.

        Args:
            config: the configuration.
            value: the new value.
        """
        setattr(self._holder(config), self.name.rpartition(".")[2], value)

    def _holder(self, config: ConfigSection) -> Any:
        return functools.reduce(getattr, self.name.split(".")[:-1], config)

    @property
    def effect(self) -> str:
        """The effect of a changed value on a run that continues with it."""
        return self.option.effect or self.section.CHANGE_EFFECT

    @property
    def needs(self) -> tuple[str, ...]:
        """The conditions without which it has no effect."""
        of_section = self.section.NEEDS
        is_named = not of_section or re.match(rf"{re.escape(self.name)}\b", of_section) is not None
        return self.option.needs if is_named else (of_section, *self.option.needs)

    @property
    def is_part_of_schedule(self) -> bool:
        """Whether the schedule of learning rate and weight decay depends on it."""
        return self.option.part_of_schedule or self.section.PART_OF_SCHEDULE


def leaves(config: ConfigSection, prefix: str = "") -> Iterator[tuple[str, ConfigSection, str]]:
    """Every value of a configuration as (dotted key, the section that holds it, field name), in order."""
    for name in config.field_names():
        value = getattr(config, name)
        if isinstance(value, ConfigSection):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", config, name


_KEYS: dict[Any, dict[str, Key]] = {}
"""The results of `keys_of` so far."""


def keys_of(kind: type[ConfigSection]) -> dict[str, Key]:
    """Every key of a configuration class by its dotted name, in order.

    Args:
        kind: the class of a configuration.
    """
    if kind not in _KEYS:
        _KEYS[kind] = {
            key: Key(key, field_types(type(section))[name], getattr(section, name), section.option(name), type(section))
            for key, section, name in leaves(kind())
        }
    return _KEYS[kind]


KEYS = keys_of(ConfigContainer)
"""Every key of a run's configuration."""

OTHER_NAMES = {name: key for key, one in KEYS.items() for name in (*one.option.known_as, one.option.hf) if name}
"""Names from other libraries, and the corresponding keys."""


def to_flat(config: ConfigSection) -> dict[str, Any]:
    """Every value by its dotted key; lists and dictionaries are values and are copied.

    Args:
        config: the configuration.
    """
    return {key: copy.deepcopy(getattr(section, name)) for key, section, name in leaves(config)}


def typed_copy(config: Section, prefix: str = "") -> Section:
    """A deep copy in which every value has the type of its field.

    Args:
        prefix: of the keys in errors.

    Raises:
        ConfigError: naming the key and the type of the first value that cannot be converted.
    """
    types, values = field_types(type(config)), dict[str, Any]()
    for name in config.field_names():
        value = getattr(config, name)
        if isinstance(value, ConfigSection):
            values[name] = typed_copy(value, f"{prefix}{name}.")
        elif isinstance(value, MixedPrecisionConfig):
            values[name] = copy.copy(value)
        else:
            values[name] = copy.deepcopy(coerce(value, types[name], f"{prefix}{name}"))
    typed = copy.copy(config)
    vars(typed).update(values)
    typed.join(None)
    typed.settle()
    return typed


def own_copy(config: ConfigContainer) -> ConfigContainer:
    """`typed_copy` of what a caller passes as the configuration of a run.

    Raises:
        ConfigError: as `typed_copy`, and for anything but a `ConfigContainer`.
    """
    if not isinstance(config, ConfigContainer):
        raise ConfigError(
            f"the configuration of a run must be a ConfigContainer, got {type(config).__name__}; "
            "onstep.config.from_dict makes one of a dictionary, args_to_config of TrainingArguments, which "
            "Trainer(model, args) accepts as they are."
        )
    return typed_copy(config)


def diff(old: ConfigSection, new: ConfigSection) -> list[tuple[str, Any, Any]]:
    """The differences as (dotted key, value in `old`, value in `new`), in the order of the fields."""
    before, after = to_flat(old), to_flat(new)
    return [(key, before.get(key), after.get(key)) for key in after | before if before.get(key) != after.get(key)]


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known dotted key, or section, that `key` most likely meant; None if nothing is near.

    A name of another library comes first, then the same name in another section, then the most similar one.

    Args:
        known: the keys that exist.
    """
    name = _last(key)
    if len(key) > WIDTH:
        return None
    synonym = OTHER_NAMES.get(name)
    if synonym in known:
        return synonym
    heads = [] if name in map(_last, known) or name != key else list(dict.fromkeys(map(_section, known)))
    if sections := difflib.get_close_matches(name, heads, 1):
        return sections[0]
    likeness = {}
    for candidate in known:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, name, _last(candidate)).ratio()
        likeness[candidate] = max(whole, 0.95 * last), whole  # the likeness of the whole keys breaks ties
    best = max(likeness, key=likeness.__getitem__, default=None)
    if best is not None and likeness[best][0] >= NEAR:
        return best
    near = [OTHER_NAMES[one] for one in difflib.get_close_matches(name, OTHER_NAMES, cutoff=NEAR)]
    return next((one for one in near if one in known), None)


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _section(key: str) -> str:
    return key.partition(".")[0]
