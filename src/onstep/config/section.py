"""The base of every section of a configuration, and `option`, which declares a key with everything about it."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from onstep.config.bridge.own_values import own_value
from onstep.config.bridge.table import dotted, rule_of
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True)
class Bound:
    """A rule for a single value, in words and as a test."""

    text: str
    holds: Callable[[Any], bool]


BOUNDS = {
    "> 0": Bound("> 0", lambda value: value > 0),
    ">= 0": Bound(">= 0", lambda value: value >= 0),
    "> 0 and at most 10,000": Bound("> 0 and at most 10,000", lambda value: 0 < value <= 10_000),
    ">= 0 and at most 1,024": Bound(">= 0 and at most 1,024", lambda value: 0 <= value <= 1024),
    "from 0 to 1": Bound("from 0 to 1", lambda value: 0 <= value <= 1),
    "at least 0 and below 1": Bound("at least 0 and below 1", lambda value: 0 <= value < 1),
}
"""The rules that many keys share."""
YEAR_SECONDS, YEAR_MINUTES = 365 * 86_400, 365 * 1_440
"""What a time may be at most: clocks and timers overflow far beyond it."""
SECONDS = Bound(f"> 0 and at most {YEAR_SECONDS:,}, a year", lambda value: 0 < value <= YEAR_SECONDS)
EPOCHS = Bound("> 0 and at most 1,000,000,000", lambda value: 0 < value <= 1_000_000_000)
MINUTES = Bound(f"> 0 and at most {YEAR_MINUTES:,}, a year", lambda value: 0 < value <= YEAR_MINUTES)
MAX_PATH_BYTES, MAX_NAME_BYTES = 3_000, 255
"""What file systems accept (4,095 bytes), less room for the files of a run below a path; and each name in it."""


def _is_path(value: str | list[str]) -> bool:
    return all(map(_is_possible, [value] if isinstance(value, str) else value))


def _is_possible(path: str) -> bool:
    is_of_nobody = path.startswith("~") and os.path.expanduser(path) == path
    names = os.fsencode(path).split(b"/")
    fits = len(os.fsencode(path)) <= MAX_PATH_BYTES and max(map(len, names)) <= MAX_NAME_BYTES
    return path != "" and fits and not is_of_nobody


PATH = Bound(
    f"a path of at most {MAX_PATH_BYTES:,} bytes, with names of at most {MAX_NAME_BYTES}; not empty, and not of an "
    "unknown ~user",
    _is_path,
)
"""The rule of keys with a path, or several."""


class ChangeClass(StrEnum):
    """The consequence of a changed key for a run that continues from a checkpoint."""

    SAFE = "safe"
    """Nothing that is learned depends on it: logging, evaluation, paths, workers, ranks, retention, limits."""
    TRAJECTORY = "changes the trajectory"
    """From here on, what is learned differs (optimizer, schedule, batch, data); the stored state still loads."""
    INCOMPATIBLE = "incompatible"
    """The stored state no longer fits: shapes of weights, state of the optimizer, meaning of token ids."""


SAFE, TRAJECTORY, INCOMPATIBLE = ChangeClass

FOLLOWS_SCHEDULE = "the learning rate follows the current schedule at the step reached"
NEW_LENGTH = "the run ends later or sooner; a schedule that ends with it is recomputed, the learning rate jumps to it"
NEW_ORDER = "another order of samples from the position reached on: some come twice this epoch, some not"
NEW_DATA = "samples of the current data from the position reached on"
INITIAL_ONLY = "no effect any more: the checkpoint has the state that it started"


@dataclass(frozen=True, kw_only=True)
class Option:
    """The facts about a key besides its name, type and default, which are the dataclass field's."""

    on_change: ChangeClass
    """The consequence of a change for a run that continues."""
    help: str
    """What the key sets, for `onstep config` and the reference page."""
    bound: Bound | None = None
    """The rule for a single value. None is allowed wherever the type includes it."""
    choices: tuple[str, ...] = ()
    """The allowed values, where they are few."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Other spellings of the choices; a resolved configuration has the choice itself."""
    elements: tuple[str, ...] = ()
    """The allowed elements of a list."""
    only_with: str = ""
    """The values of another key without which a changed value is refused, as `key=value or value`."""
    needs: tuple[str, ...] = ()
    """Conditions without which a changed value has no effect (see `checks.conditions`); a run names such values."""
    may_be_infinite: bool = False
    """Whether infinity is allowed."""
    effect: str = ""
    """What a changed value does under `checkpoint.on_config_change=apply`; empty for the section's `CHANGE_EFFECT`."""
    part_of_schedule: bool = False
    """Whether the schedule of learning rate and weight decay depends on it, besides the section `scheduler`."""
    entries: Mapping[str, ChangeClass] | None = None
    """The entries of an open dictionary that have another class than the dictionary; None where it is one value."""
    hf: str | None = None
    """The field of `TrainingArguments` that has the same value."""
    known_as: tuple[str, ...] = ()
    """Names of the same thing elsewhere, from which the key is suggested."""
    common: bool = False
    """Whether it is among the keys that most runs set; these are listed first."""


def option(
    default: T,
    on_change: ChangeClass,
    bound: Literal[
        "> 0", ">= 0", "> 0 and at most 10,000", ">= 0 and at most 1,024", "at least 0 and below 1", "from 0 to 1"
    ]
    | Bound
    | None = None,
    choices: tuple[str, ...] = (),
    *,
    help: str,
    spellings: Mapping[str, str] | None = None,
    elements: tuple[str, ...] = (),
    only_with: str = "",
    needs: str | tuple[str, ...] = (),
    may_be_infinite: bool = False,
    effect: str = "",
    part_of_schedule: bool = False,
    entries: Mapping[str, ChangeClass] | None = None,
    hf: str | None = None,
    known_as: tuple[str, ...] = (),
    common: bool = False,
) -> T:
    """A key of a configuration: its default, and the facts that `Option` describes.

    Validation, conversion, classes of changes, `onstep config` and the reference page read them from here, so a new key
    is one call of this function. Each instance has its own copy of a default that is a list or a dictionary.

    Args:
        default: the default; a list or dictionary is copied for each instance.
        on_change: the consequence of a change for a run that continues.
        bound: the rule for a single value, by name or as a `Bound`.
        choices: the allowed values, where they are few.
        help: what the key sets, in one or more sentences.
        spellings: other spellings of the choices.
        elements: the allowed elements of a list.
        only_with: the values of another key without which a changed value is refused, as `key=value or value`.
        needs: conditions without which a changed value has no effect.
        may_be_infinite: whether infinity is allowed.
        effect: what a changed value does when a run continues with it.
        part_of_schedule: whether the schedule of learning rate and weight decay depends on it.
        entries: the entries of a dictionary that have another class of change than the dictionary.
        hf: the field of `TrainingArguments` that has the same value.
        known_as: names of the same thing elsewhere, from which the key is suggested.
        common: whether it is among the keys that most runs set.
    """
    declared = Option(
        on_change=on_change,
        help=help,
        bound=BOUNDS[bound] if isinstance(bound, str) else bound,
        choices=choices,
        spellings=spellings or {},
        elements=elements,
        only_with=only_with,
        needs=(needs,) if isinstance(needs, str) else needs,
        may_be_infinite=may_be_infinite,
        effect=effect,
        part_of_schedule=part_of_schedule,
        entries=entries,
        hf=hf,
        known_as=known_as,
        common=common,
    )
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata={"option": declared})
    return field(default=default, metadata={"option": declared})


class _AnyKey(type):
    """Makes the constructor of a section accept Megatron Bridge's keys, and name any other that is unknown."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An instance; keys that are not its fields are set afterwards."""
        known: Mapping[str, Any] = getattr(cls, "__dataclass_fields__", {})
        others = {name: kwargs.pop(name) for name in list(kwargs) if name not in known}
        made = super().__call__(*args, **kwargs)
        for name, value in others.items():
            setattr(made, name, value)
        return made


@dataclass
class ConfigSection(metaclass=_AnyKey):
    """A dataclass whose attributes are its fields, and Megatron Bridge's keys that mean something else or nothing."""

    CHANGE_EFFECT = "holds from the next step on"
    """What a changed key does under the policy `apply`, unless its field says more."""
    NEEDS = ""
    """A condition without which no key of the section has an effect, besides the one that it names."""
    PART_OF_SCHEDULE = False
    """Whether the schedule of learning rate and weight decay depends on every key of the section."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = type(self).__dataclass_fields__
        if name in known:
            object.__setattr__(self, name, own_value(self, name, value))
            return
        rule = rule_of(type(self), name)
        if rule is None:
            elsewhere = _elsewhere(name, type(self))
            hint = f" Did you mean {elsewhere!r}?" if elsewhere else nearest(name, list(known))
            raise ConfigError(f"{type(self).__name__} has no field {name!r}.{hint} Its fields: {', '.join(known)}.")
        rule.check(dotted(type(self), name), value)
        object.__setattr__(self, "_given", {**self.given_of_bridge, name: value})
        if rule.apply is None:
            return
        whole = vars(self).get("_whole")
        if whole is None:
            object.__setattr__(self, "_waiting", (*vars(self).get("_waiting", ()), name))
        else:
            rule.apply(whole, value)

    if not TYPE_CHECKING:  # a type checker shall know the fields alone

        def __getattr__(self, name: str) -> Any:
            rule = None if name.startswith("_") else rule_of(type(self), name)
            if rule is None:
                raise AttributeError(f"{type(self).__name__} has no field {name!r}.")
            whole = vars(self).get("_whole")
            is_elsewhere = rule.read is not None and whole is not None
            return rule.read(whole) if is_elsewhere else self.given_of_bridge.get(name, rule.default)

    @property
    def given_of_bridge(self) -> Mapping[str, Any]:
        """Megatron Bridge's keys that were set, with their values."""
        given: Mapping[str, Any] = vars(self).get("_given", {})
        return given

    def join(self, whole: Any) -> None:
        """Become part of a whole configuration, or of none; what waited for one is set there.

        Args:
            whole: the configuration that the section is a part of; None while it is in none.
        """
        object.__setattr__(self, "_whole", whole)
        if whole is not None:
            waiting = vars(self).get("_waiting", ())
            object.__setattr__(self, "_waiting", ())
            for name in waiting:
                rule = rule_of(type(self), name)
                if rule is not None and rule.apply is not None:
                    rule.apply(whole, self.given_of_bridge[name])

    def settle(self) -> None:
        """Set what depends on several keys; for a whole configuration."""

    def validate(self) -> None:
        """Check the values of this section on their own.

        Raises:
            ConfigError: naming the value, the rule and the remedy.
        """

    def field_names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return _names_of(type(self))

    def option(self, name: str) -> Option:
        """The facts that the field of this name declares.

        Args:
            name: the name of a field.
        """
        declared: Option = type(self).__dataclass_fields__[name].metadata["option"]
        return declared

    def changed(self) -> dict[str, Any]:
        """The values that differ from their defaults, by name."""
        default = type(self)()
        values = {name: getattr(self, name) for name in self.field_names()}
        return {name: value for name, value in values.items() if value != getattr(default, name)}


@functools.cache
def _names_of(kind: Any) -> tuple[str, ...]:
    return tuple(f.name for f in fields(kind))


def _elsewhere(name: str, kind: type[ConfigSection]) -> str | None:
    """The field that `name` means: of this section under another library's name, else of another section."""
    own = [key for key, one, names in _places() if one is kind and name in names]
    same = [key for key, _, _ in _places() if key.rpartition(".")[2] == name]
    others = [key for key, _, names in _places() if name in names]
    return next(iter([*own, *same, *others]), None)


def _places() -> Iterator[tuple[str, type[ConfigSection], tuple[str | None, ...]]]:
    """Every field of a section as (dotted key, section, names of the same thing elsewhere)."""
    for holder in ConfigSection.__subclasses__():
        for one in fields(holder):
            kind = one.default_factory
            if isinstance(kind, type) and issubclass(kind, ConfigSection):
                for name, of_kind in kind.__dataclass_fields__.items():
                    declared: Option = of_kind.metadata["option"]
                    yield f"{one.name}.{name}", kind, (declared.hf, *declared.known_as)
