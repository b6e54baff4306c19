"""Reads scenarios from YAML, and makes variations of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from onstep.config.field_types import coerce, field_types
from onstep.config.load import parse_yaml
from onstep.config.suggestions import nearest, shown
from onstep.diloco.protocol.messages import Settings
from onstep.diloco.simulator.scenario import Scenario, ServerSite, Site
from onstep.errors import ConfigError

_SETTINGS = {key: value for key, value in field_types(Settings).items() if key != "blend"} | {
    "mode": str,
    "num_workers": int | None,
    "min_workers": int | None,
}
"""Those that a simulation depends on, with their types in a file."""
_MOST_VARIATIONS = 1000


def from_values(values: Mapping[str, Any]) -> Scenario:
    """The scenario with these values: `sites` by name, `server`, and the fields of `Scenario` and of `Settings`.

    Raises:
        ConfigError: for an unknown key or an invalid value.
    """
    types = {**field_types(Scenario), **_SETTINGS}
    sites = {
        str(name): Site(**_read(_mapping(one, f"sites.{name}"), field_types(Site), f"sites.{name}."))
        for name, one in _mapping(values.get("sites"), "sites").items()
    }
    server = ServerSite(**_read(_mapping(values.get("server"), "server"), field_types(ServerSite), "server."))
    found = _read({key: value for key, value in values.items() if key not in ("sites", "server")}, types, "")
    given = {key: found.pop(key) for key in list(found) if key in _SETTINGS and found[key] is not None}
    num_workers = given.pop("num_workers", sum(site.workers for site in sites.values()))
    settings = Settings.with_quorum(num_workers, **{"codec": "bf16", **given})
    found = {key: value for key, value in found.items() if key not in _SETTINGS}
    return Scenario(sites, settings, server, **found)


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
        varied = dict(values)
        for key, value in chosen:
            _set(varied, key, value)
        found.append(Variation(dict(chosen), from_values(varied)))
    return found


def _read(values: Mapping[str, Any], types: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The values, converted to the types of their keys."""
    for key in values:
        if key not in types or key in ("settings", "server", "sites"):
            raise ConfigError(
                f"there is no key {shown(prefix + str(key))} in a scenario.{nearest(str(key), list(types))}"
            )
    return {key: coerce(value, types[key], prefix + key) for key, value in values.items()}


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
    """Set a dotted key; `sites.*.key` sets it for every site."""
    section, *path = key.split(".", 2 if key.startswith("sites.") else 1)
    if section not in ("sites", "server"):
        values[key] = value
        return
    parts = _mapping(values.get(section), section)
    if len(path) != (2 if section == "sites" else 1):
        raise ConfigError(f"{key} is a section of a scenario and cannot be varied; vary one of its keys.")
    if section == "server":
        values["server"] = {**parts, path[0]: value}
        return
    names = list(parts) if path[0] == "*" else [path[0]]
    if any(name not in parts for name in names):
        raise ConfigError(f"the scenario has no site {shown(path[0])}.{nearest(path[0], [*map(str, parts), '*'])}")
    changed = {name: {**_mapping(parts[name], f"sites.{name}"), path[1]: value} for name in names}
    values["sites"] = {**parts, **changed}
