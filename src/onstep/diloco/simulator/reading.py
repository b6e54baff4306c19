"""Reads scenarios from YAML, and makes variations of one."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from onstep.config.field_types import coerce, field_types
from onstep.config.load import parse_yaml
from onstep.config.suggestions import nearest, shown
from onstep.diloco.simulator.scenario import Scenario, ServerSite, Site
from onstep.errors import ConfigError

T = TypeVar("T", Scenario, ServerSite, Site)
_MOST_VARIATIONS = 1000


def from_values(values: Mapping[str, Any]) -> Scenario:
    """The scenario with these values; `sites` is a mapping of names to the fields of `Site`. Raises ConfigError."""
    parts = dict(values)
    sites = _mapping(parts.pop("sites", {}), "sites")
    server = _mapping(parts.pop("server", {}), "server")
    return _filled(
        Scenario,
        parts,
        "",
        sites={
            str(name): _filled(Site, _mapping(one, f"sites.{name}"), f"sites.{name}.") for name, one in sites.items()
        },
        server=_filled(ServerSite, server, "server."),
    )


@dataclass(frozen=True)
class Variation:
    """One combination of values, and the scenario that has them."""

    choices: dict[str, Any]
    scenario: Scenario

    @property
    def label(self) -> str:
        """As in `sync_every=50 codec=int8`."""
        return " ".join(f"{key}={value}" for key, value in self.choices.items())


def variations(values: Mapping[str, Any], options: Sequence[str]) -> list[Variation]:
    """A scenario for each combination of `key=value,value,...` items, in the order of the options.

    `sites.home.upload_mbit` is a key of one site, `sites.*.upload_mbit` of all of them.

    Raises:
        ConfigError: as `from_values`, for an item of another form, and for more than 1,000 combinations.
    """
    choices = [_choices(option) for option in options]
    total = math.prod(len(several) for _, several in choices)
    if total > _MOST_VARIATIONS:
        raise ConfigError(f"these variations are {total:,} simulations, and the limit is 1,000; vary fewer values.")
    found = []
    for chosen in product(*[[(key, value) for value in several] for key, several in choices]):
        varied = copy.deepcopy(dict(values))
        for key, value in chosen:
            _set(varied, key, value)
        found.append(Variation(dict(chosen), from_values(varied)))
    return found


def _filled(cls: type[T], values: Mapping[str, Any], prefix: str, **others: Any) -> T:
    types = field_types(cls)
    for key in values:
        if key not in types:
            raise ConfigError(
                f"there is no key {shown(prefix + str(key))} in a scenario.{nearest(str(key), list(types))}"
            )
    found = {key: coerce(value, types[key], prefix + key) for key, value in values.items()}
    return cls(**found, **others)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a mapping of keys to values, got {shown(value)}.")
    return value


def _choices(option: str) -> tuple[str, list[Any]]:
    key, separator, text = option.partition("=")
    if not separator or not text:
        raise ConfigError(f"a variation must have the form key=value,value, such as sync_every=50,100; got {option!r}.")
    values = parse_yaml(f"values: [{text}]", f"the variation {option!r}")["values"]
    return key.strip(), values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key; in `sites.*.key`, for every site."""
    first, _, rest = key.partition(".")
    if first not in ("sites", "server"):
        values[key] = value
    elif first == "server" and rest:
        values["server"] = {**_mapping(values.get("server"), "server"), rest: value}
    elif rest.partition(".")[2]:
        name, _, field = rest.partition(".")
        _set_of_site(values, name, field, value)
    else:
        raise ConfigError(f"{key} is a section of a scenario and cannot be varied; vary one of its keys.")


def _set_of_site(values: dict[str, Any], name: str, key: str, value: Any) -> None:
    sites = _mapping(values.get("sites"), "sites")
    if name != "*" and name not in sites:
        raise ConfigError(f"the scenario has no site {shown(name)}.{nearest(name, [*map(str, sites), '*'])}")
    values["sites"] = {
        one: {**_mapping(site, f"sites.{one}"), key: value} if name in ("*", one) else site
        for one, site in sites.items()
    }
