"""Callbacks ask, the loop decides: what was asked for, by whom, and what is due."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from onstep.config.part import nearest
from onstep.errors import ConfigError

FLAGS: tuple[str, ...] = (
    "should_log",
    "should_evaluate",
    "should_save",
    "should_epoch_stop",
    "should_training_stop",
    "should_abort_without_save",
)
"""The decisions that ranks agree on, in the order of the agreed vector."""

STICKY: tuple[str, ...] = ("should_training_stop", "should_abort_without_save")
"""Stop flags: a control that a callback returns cannot take back what was set on the old one."""

BEFORE_UPDATE: tuple[str, ...] = (
    "on_forward_backward_start",
    "on_forward_backward_end",
    "on_substep_end",
    "on_pre_optimizer_step",
)
"""The moments at which a callback may ask for this step's update to be left out."""

SETTABLE: dict[str, tuple[type, float]] = {
    "lr_factor": (float, 0),
    "log_interval": (int, 0),
    "eval_interval": (int, 0),
    "save_interval": (int, 0),
    "train_iters": (int, 1),
}
"""What may change while a run goes on: type and smallest value. An interval of 0 is never."""

_VERBS = {
    "should_training_stop": "stop",
    "should_abort_without_save": "abort",
    "should_epoch_stop": "end the epoch",
    "skip": "leave out the update",
    "rollback": "go back to a checkpoint",
}


@dataclass
class TrainerControl:
    """The flags as Hugging Face callbacks know them; a callback may return one."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False


@dataclass(frozen=True)
class Request:
    """Something a callback asked for."""

    flag: str
    """One of `FLAGS`, or skip, rollback, set."""
    author: str
    event: str
    reason: str = ""
    rank: int = 0
    details: dict[str, Any] = field(default_factory=dict, hash=False)
    """What goes with it: `key` and `value` of a value to set, what the anomaly gate saw."""

    def __str__(self) -> str:
        verb = _VERBS.get(self.flag, self.flag.removeprefix("should_"))
        if self.flag == "set":
            verb = f"set {self.details.get('key')} to {self.details.get('value')!r}"
        where = f" during '{self.event}'" if self.event else ""
        why = f": {self.reason}" if self.reason else ""
        return f"asked to {verb} by '{self.author}'{where} on rank {self.rank}{why}"


@dataclass
class Control(TrainerControl):
    """The run's one control: Hugging Face's flags, and who set them.

    A context-style callback calls `stop`, `save`, `evaluate`, `log`, `end_epoch`, `abort`, `skip`, `rollback` or `set`;
    a Hugging Face-style one may also set the flags. Both become requests with author and event, on whichever rank; over
    ranks, set wins.
    """

    rank: int = 0
    requests: list[Request] = field(default_factory=list)
    """What this rank asked for since the last agreement."""
    author: str = "the loop"
    """Who is being told right now; the manager keeps it."""
    event: str = ""
    hears_before_update: bool = False
    """Whether anybody on this rank listens to one of `BEFORE_UPDATE`; only then ranks must agree on skips."""
    is_heard_before_update: bool = False
    """The same of any rank, as agreed."""
    rollback_request: Request | None = None
    """The rollback that the ranks agreed on and that the loop has yet to do."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FLAGS:
            value = bool(value)
            if "requests" in self.__dict__ and value != self.__dict__[name]:
                if value:
                    self._note(name)
                else:  # withdrawn by a later callback before anybody acted on it
                    self.requests = [request for request in self.requests if request.flag != name]
        elif name.startswith("should_"):
            raise AttributeError(
                f"control has no flag {name!r} and nobody would read it; its flags: {', '.join(FLAGS)}."
            )
        object.__setattr__(self, name, value)

    def __copy__(self) -> Control:
        """The flags alone: what a callback asks on a copy becomes a request when it returns the copy."""
        return Control(**{flag: self.__dict__[flag] for flag in FLAGS}, rank=self.rank)

    def stop(self, reason: str = "") -> None:
        """Ask for the end of training after this step."""
        self._ask("should_training_stop", reason)

    def abort(self, reason: str = "") -> None:
        """Ask for the end of training after this step, without a final save, log or evaluation."""
        self._ask("should_abort_without_save", reason)
        self.__dict__["should_training_stop"] = True

    def end_epoch(self, reason: str = "") -> None:
        """Ask for the end of this epoch after this step."""
        self._ask("should_epoch_stop", reason)

    def save(self, reason: str = "") -> None:
        """Ask for a checkpoint at this step."""
        self._ask("should_save", reason)

    def evaluate(self, reason: str = "") -> None:
        """Ask for an evaluation at this step."""
        self._ask("should_evaluate", reason)

    def log(self, reason: str = "") -> None:
        """Ask for this step to be logged."""
        self._ask("should_log", reason)

    def skip(self, reason: str = "") -> None:
        """Ask for this step's update to be left out: weights, optimizer and scheduler stay as they are.

        The step counts; its samples are remembered and not met again from the next epoch on.

        Raises:
            ConfigError: at a moment that is not one of `BEFORE_UPDATE`.
        """
        if self.event and self.event not in BEFORE_UPDATE:
            raise ConfigError(
                f"control.skip() has no meaning during {self.event!r}: it leaves out the update of the running step; "
                f"ask during {', '.join(BEFORE_UPDATE)}."
            )
        self._ask_once("skip", reason)

    def rollback(self, reason: str = "") -> None:
        """Ask, after this step, to go back to the newest checkpoint before it; the data goes on behind the step."""
        self._ask_once("rollback", reason)

    def set(self, key: str, value: float | None, reason: str = "") -> None:
        """Ask for a value to change from the next step on: one of `SETTABLE`; None is the configured value again.

        Raises:
            ConfigError: for another key, or a value that it cannot have.
        """
        check_setting(key, value)
        self._note("set", reason, key=key, value=value)

    def ask(self, request: Request) -> None:
        """Put a request in somebody's name, such as that of the anomaly gate."""
        self.requests.append(request)
        if request.flag in FLAGS:
            self.__dict__[request.flag] = True

    def decide(self, flag: str) -> None:
        """Set a flag that all ranks came to by themselves; the request of one of them is on record."""
        self.__dict__[flag] = True

    def take_skips(self) -> list[Request]:
        """This rank's requests to leave out the update of the running step; they are handed over once."""
        skips = [request for request in self.requests if request.flag == "skip"]
        if skips:
            self.requests = [request for request in self.requests if request.flag != "skip"]
        return skips

    def _ask_once(self, flag: str, reason: str) -> None:
        if not any(request.flag == flag for request in self.requests):
            self._note(flag, reason)

    def _ask(self, flag: str, reason: str) -> None:
        if not self.__dict__[flag]:
            self._note(flag, reason)
            self.__dict__[flag] = True

    def _note(self, flag: str, reason: str = "", **details: object) -> None:
        self.requests.append(Request(flag, self.author, self.event, reason, self.rank, details))

    def take(self, returned: object) -> None:
        """Adopt the flags of a control that a callback returned; its stop flags can only be added to.

        Whatever else a callback returns means nothing.
        """
        own = getattr(returned, "__dict__", {})  # a mock claims to have everything
        if returned is self or not any(flag in own or hasattr(type(returned), flag) for flag in FLAGS):
            return
        for flag in FLAGS:
            before = self.__dict__[flag]
            value = bool(getattr(returned, flag, before))
            setattr(self, flag, (value or before) if flag in STICKY else value)

    def fill(self, *, log: bool, evaluate: bool, save: bool) -> None:
        """Put what is due at this step, before `on_step_end` lets callbacks change it.

        What callbacks asked for earlier in the step stays asked for.
        """
        flags = self.__dict__
        flags["should_log"] = log or flags["should_log"]
        flags["should_evaluate"] = evaluate or flags["should_evaluate"]
        flags["should_save"] = save or flags["should_save"]

    def honoured(self, flag: str) -> None:
        """Clear a flag that the loop has acted on."""
        self.__dict__[flag] = False

    def clear_stops(self) -> None:
        """Forget the stop flags of an earlier run; called when `train()` starts."""
        for flag in FLAGS:
            self.__dict__[flag] = False
        self.requests.clear()
        self.rollback_request = None

    def vector(self) -> list[int]:
        """The flags of this rank and whether anything was asked, for one MAX over the ranks."""
        flags = self.__dict__
        return [*(int(flags[flag]) for flag in FLAGS), int(bool(self.requests))]

    def adopt(self, vector: Iterable[int]) -> bool:
        """Take the agreed vector; True when any rank asked for something."""
        *flags, asked = vector
        self.__dict__.update(zip(FLAGS, map(bool, flags), strict=True))
        return bool(asked)

    def drain(self) -> list[Request]:
        """The requests since the last agreement; they are handed over once."""
        requests, self.requests = self.requests, []
        return requests


def check_setting(key: str, value: object) -> None:
    """Check a value that is to change while the run goes on.

    Raises:
        ConfigError: naming key, value and rule.
    """
    if key not in SETTABLE:
        hint = nearest(key, list(SETTABLE))
        raise ConfigError(f"{key!r} cannot be set while a run goes on.{hint} These can: {', '.join(SETTABLE)}.")
    kind, least = SETTABLE[key]
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or (kind is int and not isinstance(value, int)) or value < least:  # type: ignore[operator]
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{key} must be {what} >= {least}, or None for the configured value; got {value!r}.")
