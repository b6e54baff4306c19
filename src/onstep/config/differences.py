"""What changed in the configuration of a run that goes on, and which configuration it goes on with.

A run that continues compares the configuration it was started with to today's. Each key has one class (`ChangeClass`):
a safe change is taken over without a question, an incompatible one is always an error, and for one that changes the
trajectory the policy `checkpoint.on_config_change` decides: `error` refuses it, `keep` goes on with the stored values,
`apply` with today's. What `apply` does:

- learning rate, weight decay and schedule: they are pure functions of progress, so from the next step on they are what
  today's configuration gives for the step reached; nothing is blended.
- length (`train_iters`, `train_samples`, `num_epochs`): the run ends later or sooner. A schedule that ends with the run
  is recomputed, so the learning rate jumps; set `scheduler.lr_decay_iters` for one that stays.
- `global_batch_size`: the position in samples stays, so that no sample is lost or met twice; the steps count on.
- `scheduler.override_opt_param_scheduler` and `scheduler.use_checkpoint_opt_param_scheduler` decide for the schedule
  alone (`SCHEDULE_KEYS`): today's holds, or the stored one, whatever the policy is for everything else.
- data, its order and seeds: the position stays a number of samples, in the order of today.
- `micro_batch_size` and the number of ranks are safe: they only split a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from onstep.config.load import OPTIONS, from_dict, leaves, merge, not_a_choice, to_flat, typed_copy
from onstep.config.part import TRAJECTORY, ChangeClass, ConfigPart
from onstep.config.parts import ConfigContainer
from onstep.config.validate import fill, validate
from onstep.errors import ConfigError

OPEN_SECTIONS = ("trainer", "env_vars")
"""Dictionaries: an entry that has no class of its own has that of its dictionary."""

ENTRIES = {"trainer.label_names": TRAJECTORY, "trainer.remove_unused_columns": TRAJECTORY}
"""The entries of those that have a class of their own."""

CLASSES = {key: option.on_change for key, option in OPTIONS.items()} | ENTRIES
"""The class of every key."""

_SCHEDULE = "the learning rate follows today's schedule at the step reached"
_LENGTH = "the run ends later or sooner; a schedule that ends with it is recomputed, the learning rate jumps to it"
_ORDER = "another order of samples from the position reached on: some come twice this epoch, some not"
_OF_DATA = (
    "seq_length", "paths", "split", "text_key", "kind", "weights", "hf_subset", "hf_split", "messages_key",
    "prompt_key", "response_key", "packing",
)  # fmt: skip
_DATA = "samples of today's data from the position reached on"
_INITIAL = "no effect any more: the checkpoint has the state that it started"

MEANINGS: dict[str, str] = {
    **dict.fromkeys(("optimizer.lr", "optimizer.min_lr"), _SCHEDULE),
    **dict.fromkeys(
        ("optimizer.decoupled_lr", "optimizer.decoupled_min_lr"), f"{_SCHEDULE}; it cannot be set or unset"
    ),
    **dict.fromkeys(("train.train_iters", "train.train_samples", "train.num_epochs"), _LENGTH),
    "train.global_batch_size": "the position in samples stays; steps count on from where they are",
    "rng.seed": "no effect on weights and dropout, whose state is loaded; where data_seed is unset, see there",
    **dict.fromkeys(("rng.data_seed", "dataset.shuffle"), _ORDER),
    **{f"dataset.{name}": _DATA for name in _OF_DATA},
    **dict.fromkeys(("model.init_method_std", "optimizer.initial_loss_scale"), _INITIAL),
    **dict.fromkeys(("checkpoint.pretrained_checkpoint", "checkpoint.finetune"), _INITIAL),
    "mixed_precision": "weights and optimizer load as they are; steps compute in today's precision",
    "validation.metric_for_best_model": "today's metric is followed from the next evaluation on",
    "checkpoint.load_optim": "the optimizer starts without its moments",
    "checkpoint.load_rng": "the random generators start from the seed",
}
"""What `apply` does, for the keys where it is not plain that today's value holds from the next step on."""


def classify(key: str) -> ChangeClass:
    """The class of a dotted key, also of an entry of a dictionary (`trainer.label_names`).

    Raises:
        ConfigError: for a key that a configuration does not have.
    """
    section = key.partition(".")[0]
    found = CLASSES.get(key, CLASSES[section] if section in OPEN_SECTIONS else None)
    if found is None:
        raise ConfigError(f"{key!r} is no key of a configuration, so a change of it has no class.")
    return found


def meaning(key: str) -> str:
    """What going on with today's value of a key does, in words; '' where the key is safe or does not fit at all."""
    if classify(key) is not TRAJECTORY:
        return ""
    default = _SCHEDULE if key.startswith("scheduler.") else "holds from the next step on"
    return MEANINGS.get(key, default)


POLICIES = OPTIONS["checkpoint.on_config_change"].choices
SCHEDULE_KEYS = tuple(
    f"optimizer.{name}" for name in ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "weight_decay")
)
"""What the schedule of learning rate and weight decay is made of, beside the section `scheduler`."""
WIDTH = 40
"""Characters of a value that `describe` shows."""


class Absent(Enum):
    """Stands for a value where a configuration lacks the key: written by another version, or a dictionary's entry."""

    ABSENT = "(absent)"

    def __repr__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Change:
    """A key whose value is another one than when the run was started."""

    key: str
    old: Any
    """The stored value; ABSENT for a key that the version that stored it did not have."""
    new: Any
    """Today's value; ABSENT for a key that this version does not have."""
    kind: ChangeClass


def changes(stored: ConfigContainer | Mapping[str, Any], today: ConfigContainer) -> list[Change]:
    """What differs between a stored configuration and today's, both resolved, in the order of the keys.

    A key that the stored one lacks counts as its default; where that is today's value, it is listed as a safe change
    from ABSENT. A stored key that no longer exists is listed as a safe change to ABSENT.

    Raises:
        ConfigError: for a stored value that no field can hold.
    """
    before, missing, gone = _read(stored)
    old, new = _flat(before), _flat(today)
    found = [
        Change(key, old.get(key, ABSENT), new.get(key, ABSENT), classify(key))
        for key in new | old
        if old.get(key, ABSENT) != new.get(key, ABSENT)
    ]
    differing = {one.key for one in found}
    added = [Change(key, ABSENT, new[key], ChangeClass.SAFE) for key in missing if key in new and key not in differing]
    dropped = [Change(key, value, ABSENT, ChangeClass.SAFE) for key, value in gone.items()]
    return found + added + dropped


def of_kind(found: Iterable[Change], kind: ChangeClass) -> list[Change]:
    """The changes of one class."""
    return [one for one in found if one.kind is kind]


def decide(found: Sequence[Change], today: ConfigContainer, policy: str, world_size: int = 1) -> ConfigContainer:
    """The configuration to go on with: a copy of today's, with the stored trajectory under the policy `keep`.

    Of the schedule alone, today's or the stored one is gone on with under any policy, where
    `scheduler.override_opt_param_scheduler` or `scheduler.use_checkpoint_opt_param_scheduler` says so.

    Raises:
        ConfigError: for an incompatible change, and under `error` for one that changes the trajectory; it names the
            keys, both values and the ways out. Also where stored and today's values do not go together.
    """
    if policy not in POLICIES:
        raise not_a_choice("checkpoint.on_config_change", policy, POLICIES)
    unfit, moved = of_kind(found, ChangeClass.INCOMPATIBLE), of_kind(found, ChangeClass.TRAJECTORY)
    scheduler, of_the_schedule = today.scheduler, []
    if scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler:
        of_the_schedule = [one for one in moved if _is_of_schedule(one)]
        moved = [one for one in moved if not _is_of_schedule(one)]
    if unfit:
        raise ConfigError(
            f"{_listed(unfit)}, and the stored state does not fit that; put the stored "
            f"{'value' if len(unfit) == 1 else 'values'} back."
        )
    if moved and policy == "error":
        more = f" (and {len(moved) - 1} more: {', '.join(one.key for one in moved[1:])})" if len(moved) > 1 else ""
        raise ConfigError(
            f"{_listed(moved[:1])}{more}, which changes what is learned; go on with today's values by "
            f"--on-config-change apply, with the stored ones by --on-config-change keep."
        )
    config = typed_copy(today)
    put_back = [*of_the_schedule] if scheduler.use_checkpoint_opt_param_scheduler else []
    put_back += moved if policy == "keep" else []
    for one in put_back:
        section, _, name = one.key.partition(".")
        if one.old is ABSENT:  # an entry of a dictionary
            getattr(config, section).pop(name)
        else:
            merge(config, {one.key: one.old})
    if put_back:
        validate(config, world_size)
    return config


def configured_schedule_holds(config: ConfigContainer) -> bool:
    """Whether a run that goes on follows the schedule that is configured, where the checkpoint's was another."""
    scheduler = config.scheduler
    is_applied = config.checkpoint.on_config_change == "apply" and not scheduler.use_checkpoint_opt_param_scheduler
    return scheduler.override_opt_param_scheduler or is_applied


def describe(found: Sequence[Change]) -> str:
    """The changes as a table, most serious first, with what `apply` does; '' where there are none."""
    order = [ChangeClass.INCOMPATIBLE, ChangeClass.TRAJECTORY, ChangeClass.SAFE]
    changed = [one for one in found if not _is_of_another_version(one) and one.key != "checkpoint.on_config_change"]
    rows = [
        (one.key, _shown(one.old), _shown(one.new), one.kind.value, meaning(one.key))
        for one in sorted(changed, key=lambda one: order.index(one.kind))
    ]
    lines = _aligned([("key", "was", "is", "class", "with apply"), *rows]) if rows else []
    added = [one.key for one in found if _is_of_another_version(one) and one.old is ABSENT]
    dropped = [one.key for one in found if _is_of_another_version(one) and one.new is ABSENT]
    if added:
        lines.append(f"new in this version, at their defaults: {', '.join(added)}")
    if dropped:
        lines.append(f"not known to this version, without effect: {', '.join(dropped)}")
    return "\n".join(lines)


def _is_of_schedule(change: Change) -> bool:
    return change.key.startswith("scheduler.") or change.key in SCHEDULE_KEYS


def _is_of_another_version(change: Change) -> bool:
    """Whether one of the two versions does not have the key at all; an entry of a dictionary just is not there."""
    return ABSENT in (change.old, change.new) and change.key.partition(".")[0] not in OPEN_SECTIONS


def _read(stored: ConfigContainer | Mapping[str, Any]) -> tuple[ConfigContainer, list[str], dict[str, Any]]:
    """A stored configuration; the keys that it lacks; the values whose keys do not exist any more."""
    if isinstance(stored, ConfigContainer):
        return stored, [], {}
    blank = ConfigContainer()
    known: dict[str, Any] = {}
    gone: dict[str, Any] = {}
    keys = {key for key, _, _ in leaves(blank)} | set(blank.field_names())
    for section, values in stored.items():
        has_fields = isinstance(getattr(blank, section, None), ConfigPart) and isinstance(values, Mapping)
        inner = {f"{section}.{name}": value for name, value in values.items()} if has_fields else {section: values}
        for key, value in inner.items():
            (known if key in keys else gone)[key] = value
    config = from_dict(known)
    missing = [key for key, _, _ in leaves(config) if key not in known]
    return fill(config, 1), missing, gone


def _flat(config: ConfigContainer) -> dict[str, Any]:
    flat = to_flat(config)
    for section in OPEN_SECTIONS:
        flat |= {f"{section}.{name}": value for name, value in flat.pop(section).items()}
    return flat


def _listed(found: Sequence[Change]) -> str:
    return ", ".join(f"{one.key} is {one.old!r} there and {one.new!r} here" for one in found)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
