"""Defines the values that can be set during a run: the loop's own, and those that callbacks declare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from onstep.commands import MOST_LR_FACTOR
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError
from onstep.files.bounded_reading import brief

_MOST = 2**53
"""Larger integers are not exact in JSON."""


class Setting(NamedTuple):
    """A number that can be set during a run."""

    kind: type
    """int or float."""
    least: float
    """The smallest allowed value."""
    help: str = ""
    """What is set, in one line."""
    most: float = _MOST
    """The largest allowed value."""


SETTABLE: dict[str, Setting] = {
    "lr_factor": Setting(float, 0, "Multiplies every learning rate of the schedule", MOST_LR_FACTOR),
    "log_interval": Setting(int, 0, "Steps between logged steps; 0 means never"),
    "eval_interval": Setting(int, 0, "Steps between evaluations; 0 means never"),
    "save_interval": Setting(int, 0, "Steps between checkpoints; 0 means never"),
    "train_iters": Setting(int, 1, "Steps of the whole run"),
    "log_straggler": Setting(int, 0, "1 compares the speed of the ranks at logged steps, 0 does not", 1),
}
"""The loop's own values."""


@dataclass(frozen=True)
class DeclaredSetting:
    """A value that a registered callback declares as settable."""

    owner: object
    attribute: str
    setting: Setting

    @property
    def value(self) -> float:
        """The current value."""
        value: float = getattr(self.owner, self.attribute)
        return value

    def put(self, value: float | None) -> None:
        """Assign a value."""
        setattr(self.owner, self.attribute, value)


def declared_settings(callbacks: Iterable[tuple[str, object]]) -> dict[str, DeclaredSetting]:
    """What callbacks, given with their names, declare in `settable`, by `<name>.<attribute>`."""
    found: dict[str, DeclaredSetting] = {}
    for name, owner in callbacks:
        declared = getattr(owner, "settable", None)
        for attribute, setting in declared.items() if isinstance(declared, Mapping) else ():
            if isinstance(setting, Setting):
                found.setdefault(f"{name}.{attribute}", DeclaredSetting(owner, attribute, setting))
    return found


def declared_commands(callbacks: Iterable[object]) -> dict[str, str]:
    """The commands, with their help, that callbacks with an `on_command` declare in `commands`."""
    found: dict[str, str] = {}
    for owner in callbacks:
        declared = getattr(owner, "commands", None)
        if isinstance(declared, Mapping) and callable(getattr(owner, "on_command", None)):
            found |= {str(name): str(words) for name, words in declared.items()}
    return found


def no_rollback_of(callbacks: Iterable[object]) -> str | None:
    """Why a run with these callbacks cannot be rolled back; None if it can."""
    return next(filter(None, (getattr(one, "no_rollback", None) for one in callbacks)), None)


def check_setting(key: str, value: object, declared: Mapping[str, DeclaredSetting] | None = None) -> None:
    """Check a value that is to be changed during the run.

    Raises:
        ConfigError: naming key, value and rule.
    """
    settings = SETTABLE | {name: one.setting for name, one in (declared or {}).items()}
    if key not in settings:
        hint = nearest(key, list(settings))
        raise ConfigError(f"{key!r} cannot be set during a run.{hint} Keys that can: {', '.join(settings)}.")
    kind, least, _, most = settings[key]
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and not isinstance(value, int)) or not least <= value <= most:  # type: ignore[operator]
        what, limit = "an integer" if kind is int else "a number", "2**53" if most == _MOST else f"{most:g}"
        raise ConfigError(
            f"{key} must be {what} >= {least} and at most {limit}, or None for the configured value; "
            f"got {brief(value)}."
        )
