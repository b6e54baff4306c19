"""The dotted keys of a configuration (`optimizer.lr`), and the known key nearest to a mistyped one."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterator
from typing import Any, TypeVar

from onstep.config.part import ConfigPart
from onstep.config.typed import coerce, field_types
from onstep.errors import ConfigError

Part = TypeVar("Part", bound=ConfigPart)

NEAR = 0.6
"""Least similarity (0 to 1) of a key that is worth suggesting."""

OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "batch_size": "train.global_batch_size",
    "max_steps": "train.train_iters",
    "steps": "train.train_iters",
    "epochs": "train.num_epochs",
    "num_train_epochs": "train.num_epochs",
    "max_grad_norm": "optimizer.clip_grad",
    "warmup_steps": "scheduler.lr_warmup_iters",
    "precision": "mixed_precision",
    "output_dir": "run.output_dir",
    "device": "dist.device",
}
"""Names that people bring from elsewhere, and ours for the same thing."""


def leaves(config: ConfigPart, prefix: str = "") -> Iterator[tuple[str, ConfigPart, str]]:
    """Every value of a configuration as (dotted key, the part that holds it, field name), in order."""
    for name in config.field_names():
        value = getattr(config, name)
        if isinstance(value, ConfigPart):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", config, name


def to_flat(config: ConfigPart) -> dict[str, Any]:
    """Every value by its dotted key; lists and dictionaries are values and are copied."""
    return {key: copy.deepcopy(getattr(part, name)) for key, part, name in leaves(config)}


def flat_types(config: ConfigPart) -> dict[str, Any]:
    """The annotation of every value by its dotted key."""
    return {key: field_types(type(part))[name] for key, part, name in leaves(config)}


def typed_copy(config: Part) -> Part:
    """A deep copy in which every value has the type of its field.

    Raises:
        ConfigError: naming the key and the type of the first value that cannot.
    """
    typed = copy.deepcopy(config)
    for key, part, name in leaves(typed):
        setattr(part, name, coerce(getattr(part, name), field_types(type(part))[name], key))
    return typed


def diff(old: ConfigPart, new: ConfigPart) -> list[tuple[str, Any, Any]]:
    """What differs, as (dotted key, value in `old`, value in `new`), in the order of the fields."""
    before, after = to_flat(old), to_flat(new)
    return [(key, before.get(key), after.get(key)) for key in after | before if before.get(key) != after.get(key)]


def nearest_key(key: str, known: list[str]) -> str | None:
    """The known dotted key that `key` most likely meant: by the whole key or by its last name, or None."""
    synonym = OTHER_NAMES.get(_last(key))
    if synonym in known and _last(key) not in map(_last, known):
        return synonym
    best = max(known, key=lambda candidate: _likeness(key, candidate), default=None)
    return best if best is not None and max(_likeness(key, best)) >= NEAR else None


def unknown_key(key: str, known: list[str]) -> ConfigError:
    """The error for a key that no field has; it names the nearest one."""
    near = nearest_key(key, known)
    hint = f" Did you mean {near!r}?" if near else f" The top-level keys are {', '.join(_heads(known))}."
    return ConfigError(f"unknown configuration key {key!r}.{hint}")


def _likeness(key: str, candidate: str) -> tuple[float, float]:
    """The better of the two likenesses first, the likeness of the whole keys to break ties."""
    whole = _ratio(key, candidate)
    return max(whole, 0.95 * _ratio(_last(key), _last(candidate))), whole


def _ratio(a: str, b: str) -> float:
    return difflib.SequenceMatcher(None, a, b).ratio()


def _last(key: str) -> str:
    return key.rpartition(".")[2]


def _heads(known: list[str]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in known))
