"""The parameter groups of an optimizer: who decays, who has a learning rate of its own, and whom Muon updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch.nn import Parameter

from onstep.config.optimizer_config import OptimizerConfig
from onstep.config.optimizer_rules import check_decoupled_entry
from onstep.config.part import nearest
from onstep.errors import ConfigError
from onstep.optim.parameter_roles import ParameterRole

IS_DECOUPLED = "is_decoupled_lr"
"""Key of every group: whether it holds embedding and output matrices that have a learning rate of their own."""


@dataclass(frozen=True, order=True)
class _Place:
    """What tells groups apart; they are sorted by it, so that the last is of the common rate."""

    is_for_adam: bool
    entry: int
    """Number of the entry of `optimizer.param_groups` that matches; after the last one where none does."""
    is_coupled: bool
    is_plain: bool
    """Without weight decay."""


def param_groups(
    roles: Mapping[Parameter, ParameterRole], config: OptimizerConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The groups for Muon (none for another optimizer) and those for the other updates; none is empty.

    Without further settings there are two: matrices and larger, with weight decay (`wd_mult` 1), and parameters of
    fewer dimensions and biases, without (`wd_mult` 0).

    Raises:
        ConfigError: an entry of `optimizer.param_groups` matches no trainable parameter that is left for it, or lets a
            decoupled rate rise.
    """
    entries = [str(entry["match"]) for entry in config.param_groups]
    matched = {param: _first_match(role.name, entries) for param, role in roles.items()}
    _check_all_used(entries, set(matched.values()), [role.name for role in roles.values()])
    members: dict[_Place, list[Parameter]] = {}
    for param, role in roles.items():
        is_for_adam = config.optimizer != "muon" or not role.is_layer_matrix
        is_coupled = not (has_decoupled_rate(config) and role.is_embedding_or_output)
        members.setdefault(_Place(is_for_adam, matched[param], is_coupled, not role.is_decayed), []).append(param)
    groups = [(place, _group(place, members[place], config)) for place in sorted(members)]
    return (
        [group for place, group in groups if not place.is_for_adam],
        [group for place, group in groups if place.is_for_adam],
    )


def has_decoupled_rate(config: OptimizerConfig) -> bool:
    """Whether embedding and output matrices have a schedule of their own."""
    return config.decoupled_lr is not None or config.decoupled_min_lr is not None


def _first_match(name: str, entries: Sequence[str]) -> int:
    return next((number for number, entry in enumerate(entries) if fnmatchcase(name, entry)), len(entries))


def _group(place: _Place, params: list[Parameter], config: OptimizerConfig) -> dict[str, Any]:
    group: dict[str, Any] = {
        "params": params,
        "weight_decay": 0.0 if place.is_plain else config.weight_decay,
        "wd_mult": 0.0 if place.is_plain else 1.0,
        IS_DECOUPLED: not place.is_coupled,
    }
    if not place.is_coupled:
        group |= {"max_lr": config.decoupled_lr, "min_lr": config.decoupled_min_lr}
    if place.entry < len(config.param_groups):
        if not place.is_coupled:
            check_decoupled_entry(place.entry, config)
        entry = config.param_groups[place.entry]
        group |= {key: float(value) for key, value in entry.items() if key != "match" and value is not None}
        group["weight_decay"] = config.weight_decay * group["wd_mult"]
    if group.get("max_lr") is not None or "lr_mult" in group:  # what holds where there is no scheduler
        highest = config.lr if group.get("max_lr") is None else group["max_lr"]
        group["lr"] = (highest or 0.0) * group.get("lr_mult", 1.0)
    return group


def _check_all_used(entries: Sequence[str], used: set[int], names: list[str]) -> None:
    for number, entry in enumerate(entries):
        if number in used:
            continue
        earlier = sorted({entries[_first_match(name, entries)] for name in names if fnmatchcase(name, entry)})
        if earlier:
            raise ConfigError(
                f"optimizer.param_groups[{number}] matches only what earlier entries have taken, "
                f"{', '.join(earlier)}, got match={entry!r}; put it before them, or remove it"
            )
        raise ConfigError(
            f"optimizer.param_groups[{number}] must match the name of a trainable parameter, got match={entry!r}."
            f"{_nearest_names(entry, names)}"
        )


def _nearest_names(entry: str, names: list[str]) -> str:
    """A hint: the name nearest to a plain entry, the word of a name nearest to one of a pattern's, and some names."""
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
    unknown = [word for word in entry.replace("*", "").split(".") if word and word not in parts]
    of_words = next((found for word in unknown if (found := nearest(word, parts))), "")
    hint = of_words if "*" in entry else nearest(entry, names)
    return f"{hint} Names are such as {', '.join(names[:3])}."
