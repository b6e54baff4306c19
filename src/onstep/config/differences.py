"""Changes of the configuration of a run that continues from a checkpoint, and the configuration it continues with.

Each key has one class (`ChangeClass`): a safe change is accepted silently, an incompatible one is always an error, and
for a change of the trajectory the policy `checkpoint.on_config_change` decides: `error` refuses it, `keep` continues
with the stored values, `apply` with the current ones. Under `apply`:

- learning rate, weight decay and schedule are pure functions of progress, so from the next step on they are what the
  current configuration gives for the step reached; nothing is blended.
- length (`train_iters`, `train_samples`, `num_epochs`): the run ends later or sooner. A schedule that ends with the run
  is recomputed, so the learning rate jumps; set `scheduler.lr_decay_iters` to avoid that.
- `global_batch_size`: the position in samples stays, so no sample is lost or repeated; steps count on.
- `scheduler.override_opt_param_scheduler` and `scheduler.use_checkpoint_opt_param_scheduler` decide for the schedule
  alone (`Key.is_part_of_schedule`) between the current and the stored one, under any policy.
- data, its order and seeds: the position stays a number of samples, in the current order.
- `micro_batch_size` and the number of ranks are safe: they only split a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from onstep.config.checks import validate
from onstep.config.checks.single_values import check_values
from onstep.config.container import ConfigContainer
from onstep.config.derived import fill
from onstep.config.hf.optimizers import NATIVE
from onstep.config.keys import KEYS, keys_of, leaves, to_flat, typed_copy
from onstep.config.load import merge
from onstep.config.section import ChangeClass, ConfigSection
from onstep.config.suggestions import listed, not_a_choice, shown
from onstep.errors import ConfigError

OPEN_SECTIONS = tuple(key for key, one in KEYS.items() if one.option.entries is not None)
"""Open dictionaries: their entries have the class of the dictionary, unless it declares another one."""

POLICIES = KEYS["checkpoint.on_config_change"].option.choices
_MOVED = {"full_determinism": "train.deterministic"}
"""Entries of `trainer` in configurations of earlier versions that have become keys."""
_KEYS_SHOWN = 30
WIDTH = 40
"""Characters of a value that `describe` shows."""


def classify(key: str, kind: type[ConfigSection] = ConfigContainer) -> ChangeClass:
    """The class of a dotted key, also of an entry of a dictionary (`trainer.label_names`).

    Args:
        key: the dotted key.
        kind: the consequence of the change.

    Raises:
        ConfigError: for a key that a configuration does not have.
    """
    keys = keys_of(kind)
    if key in keys:
        return keys[key].option.on_change
    section, _, entry = key.partition(".")
    if section not in OPEN_SECTIONS:
        raise ConfigError(f"{key!r} is not a configuration key, so its changes have no class.")
    return (keys[section].option.entries or {}).get(entry, keys[section].option.on_change)


def meaning(key: str, kind: type[ConfigSection] = ConfigContainer) -> str:
    """The effect of continuing with the current value of a key, in words; '' for a safe or incompatible key.

    Args:
        key: the dotted key.
        kind: the consequence of the change.
    """
    if classify(key, kind) is not ChangeClass.TRAJECTORY:
        return ""
    keys = keys_of(kind)
    return keys[key].effect if key in keys else kind.CHANGE_EFFECT


class Absent(Enum):
    """A placeholder for the value of a key that a configuration lacks: another version's, or a dictionary's entry."""

    ABSENT = "(absent)"

    def __repr__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the one the run was started with."""

    key: str
    """The dotted key."""
    old: Any
    """The stored value; ABSENT for a key that the version that stored it did not have."""
    new: Any
    """The current value; ABSENT for a key that this version does not have."""
    kind: ChangeClass
    """The consequence of the change."""


def changes(stored: ConfigContainer | Mapping[str, Any], current: ConfigContainer) -> list[Change]:
    """The differences between a stored configuration and the current one, both resolved, in the order of the keys.

    A key that the stored one lacks counts as its default; if that is the current value, it is listed as a safe change
    from ABSENT. A stored key that no longer exists is listed as a safe change to ABSENT.

    Args:
        stored: the configuration of the checkpoint, by dotted key.
        current: the configuration that continues, by dotted key.

    Raises:
        ConfigError: for a stored value that no field can hold.
    """
    before, missing, gone = _read(stored, type(current))
    old, new = _flat(before), _flat(current)
    found = [
        Change(key, old.get(key, ABSENT), new.get(key, ABSENT), _kind(key, old, new, type(current)))
        for key in new | old
        if old.get(key, ABSENT) != new.get(key, ABSENT)
    ]
    differing = {one.key for one in found}
    added = [Change(key, ABSENT, new[key], ChangeClass.SAFE) for key in missing if key in new and key not in differing]
    dropped = [Change(key, value, ABSENT, ChangeClass.SAFE) for key, value in gone.items()]
    return found + added + dropped


def _kind(key: str, old: Mapping[str, Any], new: Mapping[str, Any], container: type[ConfigSection]) -> ChangeClass:
    """As `classify`; AdamW is the same optimizer under each of its names."""
    if key == "trainer.optim" and {old.get(key, "adamw_torch"), new.get(key, "adamw_torch")} <= NATIVE.keys():
        return ChangeClass.SAFE
    return classify(key, container)


def of_kind(found: Iterable[Change], kind: ChangeClass) -> list[Change]:
    """The changes of one class."""
    return [one for one in found if one.kind is kind]


def decide(
    found: Sequence[Change], current: ConfigContainer, policy: str, world_size: int | None = None
) -> ConfigContainer:
    """The configuration to continue with: a copy of the current one, with the stored trajectory under `keep`.

    `scheduler.override_opt_param_scheduler` and `scheduler.use_checkpoint_opt_param_scheduler` choose the current or
    the stored schedule under any policy.

    Args:
        found: the changes.
        current: the configuration that continues.
        policy: `checkpoint.on_config_change`: what is done with changes.
        world_size: the number of ranks; None for the fewest that the sizes of the configuration allow.

    Raises:
        ConfigError: for an incompatible change, and under `error` for one that changes the trajectory; it names the
            keys, both values and the remedies. Also if stored and current values contradict each other.
    """
    if policy not in POLICIES:
        raise not_a_choice("checkpoint.on_config_change", policy, POLICIES)
    unfit, moved = of_kind(found, ChangeClass.INCOMPATIBLE), left_to_policy(found, current)
    if unfit:
        raise ConfigError(
            f"{_listed(unfit)}, and the stored state does not fit the change; restore the stored "
            f"{'value' if len(unfit) == 1 else 'values'}."
        )
    if moved and policy == "error":
        more = f" (and {len(moved) - 1} more: {', '.join(one.key for one in moved[1:])})" if len(moved) > 1 else ""
        raise ConfigError(
            f"{_listed(moved[:1])}{more}, which changes what is learned; continue with the current values by "
            f"--on-config-change apply, or with the stored ones by --on-config-change keep."
        )
    config = typed_copy(current)
    put_back = moved if policy == "keep" else []
    if current.scheduler.use_checkpoint_opt_param_scheduler:
        put_back = [*filter(_is_of_schedule, of_kind(found, ChangeClass.TRAJECTORY)), *put_back]
    for one in put_back:
        section, _, name = one.key.partition(".")
        if one.old is ABSENT:  # an entry of a dictionary
            getattr(config, section).pop(name)
        else:
            merge(config, {one.key: one.old})
    if put_back:
        validate(config, world_size)
    return config


def left_to_policy(found: Sequence[Change], current: ConfigContainer) -> list[Change]:
    """The changes of the trajectory for which `checkpoint.on_config_change` decides."""
    moved, scheduler = of_kind(found, ChangeClass.TRAJECTORY), current.scheduler
    if scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler:
        moved = [one for one in moved if not _is_of_schedule(one)]
    return moved


def configured_schedule_holds(config: ConfigContainer) -> bool:
    """Whether a run that continues follows the configured schedule instead of the checkpoint's."""
    scheduler = config.scheduler
    is_applied = config.checkpoint.on_config_change == "apply" and not scheduler.use_checkpoint_opt_param_scheduler
    return scheduler.override_opt_param_scheduler or is_applied


def describe(found: Sequence[Change]) -> str:
    """The changes as a table, most serious first, with the effect of `apply`; '' if there are none.

    Args:
        found: the changes.
    """
    order = [ChangeClass.INCOMPATIBLE, ChangeClass.TRAJECTORY, ChangeClass.SAFE]
    changed = [one for one in found if not _is_of_another_version(one) and one.key != "checkpoint.on_config_change"]
    rows = [
        (one.key, _shown(one.old), _shown(one.new), one.kind.value, meaning(one.key))
        for one in sorted(changed, key=lambda one: order.index(one.kind))
    ]
    lines = _aligned([("key", "was", "is", "class", "with apply"), *rows]) if rows else []
    added = [one.key for one in found if _is_of_another_version(one) and one.old is ABSENT]
    dropped = [_shown(one.key) for one in found if _is_of_another_version(one) and one.new is ABSENT]
    if added:
        lines.append(f"new in this version, at their defaults: {listed(added, _KEYS_SHOWN)}")
    if dropped:
        lines.append(f"not known to this version, without effect: {listed(dropped, _KEYS_SHOWN)}")
    return "\n".join(lines)


def _is_of_schedule(change: Change) -> bool:
    return change.key in KEYS and KEYS[change.key].is_part_of_schedule


def _is_of_another_version(change: Change) -> bool:
    """Whether one of the two versions does not have the key at all, rather than an entry of a dictionary."""
    return ABSENT in (change.old, change.new) and change.key.partition(".")[0] not in OPEN_SECTIONS


def _read(
    stored: ConfigContainer | Mapping[str, Any], kind: type[ConfigContainer]
) -> tuple[ConfigContainer, list[str], dict[str, Any]]:
    """A stored configuration; the keys that it lacks; the values whose keys no longer exist."""
    if isinstance(stored, ConfigContainer):
        return stored, [], {}
    blank = kind()
    known: dict[str, Any] = {}
    gone: dict[str, Any] = {}
    keys = {key for key, _, _ in leaves(blank)} | set(blank.field_names())
    for section, values in stored.items():
        has_fields = isinstance(getattr(blank, section, None), ConfigSection) and isinstance(values, Mapping)
        inner = {f"{section}.{name}": value for name, value in values.items()} if has_fields else {section: values}
        for key, value in inner.items():
            (known if key in keys else gone)[key] = value
    if isinstance(known.get("trainer"), Mapping):
        entries = dict(known["trainer"])
        known |= {key: entries.pop(entry) for entry, key in _MOVED.items() if entry in entries and key in keys}
        known["trainer"] = entries
    config = kind()
    merge(config, known)
    missing = [key for key, _, _ in leaves(config) if key not in known]
    return fill_stored(config), missing, gone


def fill_stored(config: ConfigContainer) -> ConfigContainer:
    """`fill` for a stored configuration, whose sizes are checked first.

    Raises:
        ConfigError: naming the first value that is invalid.
    """
    check_values(config.model, "model.")
    check_values(config.train, "train.")
    return fill(config, 1)


def _flat(config: ConfigContainer) -> dict[str, Any]:
    flat = to_flat(config)
    for section in OPEN_SECTIONS:
        flat |= {f"{section}.{name}": value for name, value in flat.pop(section).items()}
    return flat


def _listed(found: Sequence[Change]) -> str:
    texts = [f"{one.key} is {shown(one.old)} there and {shown(one.new)} here" for one in found]
    return listed(texts, _KEYS_SHOWN)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) and value else shown(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
