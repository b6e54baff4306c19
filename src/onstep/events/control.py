"""Defines `Control`, which records what callbacks request and what is due; the loop decides and acts on it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from onstep.commands import asked_words
from onstep.errors import ConfigError, warn_once
from onstep.events.events import events_named
from onstep.events.exportable_state import ExportableState
from onstep.events.settings import DeclaredSetting, check_setting
from onstep.train_state import StateDict

logger = logging.getLogger(__name__)

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
"""Stop flags: a control returned by a callback cannot reset these flags."""

BEFORE_UPDATE: tuple[str, ...] = (
    "on_forward_backward_start",
    "on_forward_backward_end",
    "on_substep_end",
    "on_pre_optimizer_step",
)
"""The events at which a callback may request that this step's update be skipped."""

_HF_FLAGS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


@dataclass
class TrainerControl(ExportableState):
    """The flags of Hugging Face's `TrainerControl`; a callback may return one. Further attributes are kept."""

    should_training_stop: bool = False
    """Whether training stops after this step."""
    should_epoch_stop: bool = False
    """Whether the epoch ends after this step."""
    should_save: bool = False
    """Whether a checkpoint is saved at this step."""
    should_evaluate: bool = False
    """Whether an evaluation runs at this step."""
    should_log: bool = False
    """Whether this step is logged."""
    should_abort_without_save: bool = False
    """Whether training stops without a final save, log or evaluation."""

    def state(self) -> StateDict:
        """Hugging Face's flags, as its Trainer saves them."""
        return {"args": {flag: getattr(self, flag) for flag in _HF_FLAGS}, "attributes": {}}

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = self.should_evaluate = self.should_log = False


@dataclass(frozen=True)
class Request:
    """A request made by a callback."""

    flag: str
    """One of `onstep.commands.REQUESTS`."""
    author: str
    """The name of the callback."""
    event: str
    """The event at which it was made."""
    reason: str = ""
    """The reason in words."""
    rank: int = 0
    """The rank that made it, from 0."""
    details: dict[str, Any] = field(default_factory=dict, hash=False)
    """Details of the request: `key` and `value` of a value to set, what the anomaly gate observed, or the name, the
    `data` and later the `result` of a `command`."""

    @property
    def is_steered(self) -> bool:
        """Whether it was sent to the run from outside; a run that resumes before the next checkpoint repeats it."""
        return "command_id" in self.details

    def __str__(self) -> str:
        where = f" during '{self.event}'" if self.event else ""
        why = f": {self.reason}" if self.reason else ""
        return f"asked to {asked_words(self.flag, self.details)} by '{self.author}'{where} on rank {self.rank}{why}"


@dataclass
class Control(TrainerControl):
    """The control of a run: Hugging Face's flags, and the requests that set them.

    Context-style callbacks call `stop`, `save`, `evaluate`, `log`, `end_epoch`, `abort`, `skip`, `rollback` or `set`;
    Hugging Face-style callbacks can also set the flags. Either way, a request with its author and event is recorded, on
    any rank. A flag that is set on any rank is set on all ranks. Attributes that are not fields are the user's: later
    callbacks of this rank see them, and the loop does not.

    Args:
        should_training_stop: whether training stops after this step.
        should_epoch_stop: whether the epoch ends after this step.
        should_save: whether a checkpoint is saved at this step.
        should_evaluate: whether an evaluation runs at this step.
        should_log: whether this step is logged.
        should_abort_without_save: whether training stops without a final save, log or evaluation.
    """

    rank: int = 0
    """This rank, from 0."""
    requests: list[Request] = field(default_factory=list)
    """Requests of this rank since ranks last agreed."""
    author: str = "the loop"
    """Name of the callback that is currently being called; set by the manager."""
    event: str = ""
    """The event at which the callback is being called."""
    has_pre_update_listener: bool = False
    """Whether this rank has a listener for an event of `BEFORE_UPDATE`; only then must ranks agree on skips."""
    any_pre_update_listener: bool = False
    """The same for any rank, as agreed between ranks."""
    rollback_request: Request | None = None
    """The rollback that ranks agreed on and that the loop has not done yet."""
    declared: dict[str, DeclaredSetting] = field(default_factory=dict, repr=False)
    """Values of the registered callbacks that can be set during the run, by their key."""
    commands: dict[str, str] = field(default_factory=dict, repr=False)
    """Commands that registered callbacks carry out, and what they do."""
    no_rollback: str | None = None
    """Why the run cannot be rolled back, as a registered callback says."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in FLAGS:
            value = bool(value)
            if "requests" in self.__dict__ and value != self.__dict__[name]:
                if value:
                    self._note(name)
                else:  # withdrawn by a later callback before the loop acted on it
                    self.requests = [request for request in self.requests if request.flag != name]
        elif name not in self.__dict__ and (name.startswith("should_") or "stop" in name):
            _name_misspelling(name)
        object.__setattr__(self, name, value)

    def __copy__(self) -> Control:
        """Copy flags and user's attributes; changes that a callback makes to a copy become requests when it returns
        the copy.
        """
        copied = Control(**{flag: self.__dict__[flag] for flag in FLAGS}, rank=self.rank)
        copied.__dict__.update(self.user_attributes())
        return copied

    def user_attributes(self) -> dict[str, object]:
        """The attributes that callbacks have added."""
        return _added_to(self)

    def stop(self, reason: str = "") -> None:
        """Request that training stop after this step.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request("should_training_stop", reason)

    def abort(self, reason: str = "") -> None:
        """Request that training stop after this step, without a final save, log or evaluation.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request("should_abort_without_save", reason)
        self.__dict__["should_training_stop"] = True

    def end_epoch(self, reason: str = "") -> None:
        """Request that this epoch end after this step.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request("should_epoch_stop", reason)

    def save(self, reason: str = "") -> None:
        """Request a checkpoint at this step.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request("should_save", reason)

    def evaluate(self, reason: str = "") -> None:
        """Request an evaluation at this step.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request("should_evaluate", reason)

    def log(self, reason: str = "") -> None:
        """Request that this step be logged.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request("should_log", reason)

    def skip(self, reason: str = "") -> None:
        """Request that this step's update be skipped: weights, optimizer and scheduler stay unchanged.

        The step still counts. Its samples are recorded and skipped from the next epoch on.

        Args:
            reason: the reason in words, for messages and the record of the run.

        Raises:
            ConfigError: at an event that is not one of `BEFORE_UPDATE`.
        """
        if self.event and not any(event.name in BEFORE_UPDATE for event in events_named(self.event)):
            raise ConfigError(
                f"control.skip() must be called before the update of the step, got a call during {self.event!r}; "
                f"call it during {', '.join(BEFORE_UPDATE)}."
            )
        self._request_once("skip", reason)

    def rollback(self, reason: str = "", **details: object) -> None:
        """Request a rollback after this step to the newest checkpoint before it; data continues after this step.

        Args:
            reason: recorded with the decision.
            **details: `to_step` selects the newest checkpoint at or before that step; `lr_factor` replaces
                `anomaly.rollback_lr_factor`.

        Raises:
            ConfigError: for a `lr_factor` that cannot be set.
        """
        check_setting("lr_factor", details.get("lr_factor"))
        self._request_once("rollback", reason, **details)

    def pause(self, reason: str = "") -> None:
        """Request that all ranks wait after this step, until a callback asks to resume or the run is asked to end.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request_once("pause", reason)

    def resume(self, reason: str = "") -> None:
        """Request that a paused run continue; called during `on_paused`.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._request_once("resume", reason)

    def skip_batch(self, count: int = 1, reason: str = "") -> None:
        """Request that the next `count` steps only read their batches: they count, but nothing is trained on them.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._note("skip_batch", reason, count=count)

    def command(self, name: str, data: Mapping[str, object] | None = None, reason: str = "") -> None:
        """Request that `on_command` fires after this step, on all ranks, for callbacks that carry out `name`.

        `data` must be picklable: the other ranks receive it.

        Args:
            reason: the reason in words, for messages and the record of the run.
        """
        self._note("command", reason, command=name, data=dict(data or {}))

    def set(self, key: str, value: float | None, reason: str = "") -> None:
        """Request a new value for a key, from the next step on; None restores the configured value.

        Keys are those of `onstep.events.settings.SETTABLE`, and `<callback>.<attribute>` of what a registered callback
        declares as `settable`.

        Args:
            key: the name of what is set, such as `lr_factor` or `MyCallback.threshold`.
            value: the new value.
            reason: the reason in words, for messages and the record of the run.

        Raises:
            ConfigError: for an unknown key or an invalid value.
        """
        check_setting(key, value, self.declared)
        self._note("set", reason, key=key, value=value)

    def add_request(self, request: Request) -> None:
        """Add a request made on behalf of another author, such as the anomaly gate.

        Args:
            request: the request, with its author.
        """
        self.requests.append(request)
        if request.flag in FLAGS:
            self.__dict__[request.flag] = True

    def set_flag(self, flag: str) -> None:
        """Set a flag that all ranks arrived at independently; the request of one of them is already recorded.

        Args:
            flag: the name of the flag, such as `should_save`.
        """
        self.__dict__[flag] = True

    def pop_skips(self) -> list[Request]:
        """Remove and return this rank's requests to skip the update of the current step."""
        skips = [request for request in self.requests if request.flag == "skip"]
        if skips:
            self.requests = [request for request in self.requests if request.flag != "skip"]
        return skips

    def _request_once(self, flag: str, reason: str, **details: object) -> None:
        if not any(request.flag == flag for request in self.requests):
            self._note(flag, reason, **details)

    def _request(self, flag: str, reason: str) -> None:
        if not self.__dict__[flag]:
            self._note(flag, reason)
            self.__dict__[flag] = True

    def _note(self, flag: str, reason: str = "", **details: object) -> None:
        self.requests.append(Request(flag, self.author, self.event, reason, self.rank, details))

    def merge(self, returned: object) -> None:
        """Merge a control that a callback returned: its flags and added attributes. Stop flags cannot be reset.

        Another return value is ignored; one that is not None is named once.

        Args:
            returned: what the callback returned; anything but a control changes nothing.
        """
        if returned is None or returned is self:
            return
        own = getattr(returned, "__dict__", {})  # a mock would have every attribute
        if not any(flag in own or hasattr(type(returned), flag) for flag in FLAGS):
            what = f"{self.author} returned a {type(returned).__name__} from {self.event}"
            warn_once(logger, f"{what}, which has no effect; return None, or control with its flags set")
            return
        for flag in FLAGS:
            before = self.__dict__[flag]
            value = bool(getattr(returned, flag, before))
            setattr(self, flag, (value or before) if flag in STICKY else value)
        self.__dict__.update(_added_to(returned))

    def set_due(self, *, log: bool, evaluate: bool, save: bool) -> None:
        """Set the flags of what is due at this step, before callbacks can change them in `on_step_end`.

        Requests made earlier in the step remain.
        """
        flags = self.__dict__
        flags["should_log"] = log or flags["should_log"]
        flags["should_evaluate"] = evaluate or flags["should_evaluate"]
        flags["should_save"] = save or flags["should_save"]

    def clear(self, flag: str) -> None:
        """Clear a flag after the loop has acted on it.

        Args:
            flag: the name of the flag, such as `should_save`.
        """
        self.__dict__[flag] = False

    def clear_stops(self) -> None:
        """Clear the flags and requests of an earlier run; called when `train()` starts."""
        for flag in FLAGS:
            self.__dict__[flag] = False
        self.requests.clear()
        self.rollback_request = None

    def vector(self) -> list[int]:
        """The flags of this rank and whether it has requests, for `World.agree`."""
        flags = self.__dict__
        return [*(int(flags[flag]) for flag in FLAGS), int(bool(self.requests))]

    def set_agreed(self, vector: Iterable[int]) -> bool:
        """Set the flags from the agreed vector; True if any rank has requests.

        Args:
            vector: the flags as 0 and 1, in their order.
        """
        *flags, asked = vector
        self.__dict__.update(zip(FLAGS, map(bool, flags), strict=True))
        return bool(asked)

    def pop_requests(self) -> list[Request]:
        """Remove and return the requests since ranks last agreed."""
        requests, self.requests = self.requests, []
        return requests


_FIELDS = frozenset(Control.__dataclass_fields__)


def _added_to(control: object) -> dict[str, object]:
    return {name: value for name, value in vars(control).items() if name not in _FIELDS}


def _of_the_same_words(name: str) -> list[str]:
    """The flags that have the words of a name in another order, or, after `should`, some of them."""
    words = set(name.split("_")) - {"should"}
    flags = {flag: set(flag.split("_")) - {"should"} for flag in FLAGS}
    return [flag for flag, own in flags.items() if own == words or (name.startswith("should_") and own <= words)]


def _name_misspelling(name: str) -> None:
    """Warn of a new attribute whose name is almost that of a flag."""
    shortened = [flag for flag in FLAGS if flag.startswith(name) or flag.endswith(name.removeprefix("should"))]
    near = shortened or get_close_matches(name, FLAGS, n=1, cutoff=0.9) or _of_the_same_words(name)
    if near:
        warnings.warn(
            f"control has no flag {name!r}, so setting it does nothing but keep the value for other callbacks; did you "
            f"mean {' or '.join(map(repr, near))}?",
            UserWarning,
            stacklevel=3,
        )
