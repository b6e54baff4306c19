"""Defines `Callback` and `TrainerCallback`, the base classes whose event methods are generated from the event table;
and Hugging Face's `DefaultFlowCallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from onstep.config import TrainingArguments
from onstep.errors import ConfigError
from onstep.events.context import CallbackContext
from onstep.events.control import TrainerControl
from onstep.events.events import EVENTS, HF_EVENTS, VALID_EVENTS, events_named
from onstep.events.settings import Setting
from onstep.events.trainer_state import TrainerState
from onstep.record.kinds import Metrics


class Callback:
    """Base class of context-style callbacks: override `on_<event>(self, context)` for the events you need.

    Only overridden methods are registered. Class attributes control the dispatch:

    - `ranks`: "all" calls the callback on every rank, "main" on rank 0 only;
    - `on_error`: "raise" ends the run, "warn" continues, "disable" continues without this callback;
    - `shows_progress`: True if the callback reports progress itself, so that `pretrain()` adds none that does.
    - `settable`: attributes that can be set during the run, as `<name of the callback>.<attribute>`: on all ranks at
      one step, recorded, saved in checkpoints, and set again when the run resumes;
    - `commands`: names of commands that its `on_command` carries out, and one line about each;
    - `check_start()`: a method that is called on each rank before anything is built; what it raises ends the run there.
    - `changes_weights`: False if none of its methods changes weights or optimizer state, so that the copies of an
      asynchronous save need not end before they are called; None for unknown.
    - `no_rollback`: why a run with this callback cannot be rolled back; None if it can;
    - `reads_weights`: False if none of its methods reads weights, so that gathers of a distributed optimizer need not
      end before they are called; None for unknown, which counts as True.
    - `needs_whole_model`: True if it requires all layers of the model on its rank, so that it is refused in a pipeline.
    """

    ranks: Literal["all", "main"] = "all"
    on_error: Literal["raise", "warn", "disable"] = "raise"
    shows_progress: bool = False
    settable: ClassVar[Mapping[str, Setting]] = {}
    commands: ClassVar[Mapping[str, str]] = {}
    changes_weights: bool | None = None
    no_rollback: str | None = None
    reads_weights: bool | None = None
    needs_whole_model: bool = False
    needs_onstep: str | None = "it has methods of the form on_<event>(context), which no other trainer calls"
    """Why it cannot work in Hugging Face's Trainer, where it is refused."""

    def skips_event(self, name: str) -> bool:
        """Whether the method `name` has nothing to do as this callback is configured; checked at registration.

        An event that all its listeners skip costs nothing.
        """
        return False


class TrainerCallback:
    """Base class of Hugging Face-style callbacks: `on_step_end(self, args, state, control, **kwargs)` and its siblings.

    Handlers are called with keyword arguments and may declare any subset of them if they accept `**kwargs`. Handlers
    that rename the first three parameters, or accept `*args`, get those three by position. They return None or a
    `TrainerControl`. Every event can be handled, by its Hugging Face name or its context name. Class attributes are
    those of `Callback`.
    """

    ranks: Literal["all", "main"] = "all"
    on_error: Literal["raise", "warn", "disable"] = "raise"
    shows_progress: bool = False
    settable: ClassVar[Mapping[str, Setting]] = {}
    commands: ClassVar[Mapping[str, str]] = {}
    changes_weights: bool | None = None
    no_rollback: str | None = None
    reads_weights: bool | None = None
    needs_whole_model: bool = False
    needs_onstep: str | None = None
    """Why it cannot work in Hugging Face's Trainer, where it is refused; None if it can."""

    @property
    def name(self) -> str:
        """Name of this callback in messages: that of its class; set it to distinguish two instances."""
        return str(self.__dict__.get("name", type(self).__name__))

    @name.setter
    def name(self, name: str) -> None:
        self.__dict__["name"] = name

    def skips_event(self, name: str) -> bool:
        """As in `Callback`.

        Args:
            name: the name of the event's method.
        """
        return False


def refuse_elsewhere(callback: Callback | TrainerCallback, state: object) -> None:
    """Refuse a callback that needs Onstep's loop, where Hugging Face's Trainer calls it.

    Raises:
        ConfigError: naming the callback and the reason.
    """
    if callback.needs_onstep is not None and _is_theirs(state):
        name = getattr(callback, "name", type(callback).__name__)
        raise ConfigError(
            f"{name} does not work in Hugging Face's Trainer: {callback.needs_onstep}. Remove it there, or use "
            "onstep.Trainer, which accepts the same arguments."
        )


def log_elsewhere(
    callback: TrainerCallback, state: TrainerState, logs: Metrics | None = None, **keywords: object
) -> None:
    """Call `on_log_step` for Hugging Face's Trainer, which does not; what it adds also enters the log history."""
    if logs is not None and _is_theirs(state):
        given = set(logs)
        callback.on_log_step(state=state, logs=logs, **keywords)  # type: ignore[attr-defined]
        state.log_history[-1].update({name: value for name, value in logs.items() if name not in given})


def _is_theirs(state: object) -> bool:
    return type(state).__module__.partition(".")[0] == "transformers"


def _context_method(name: str, when: str) -> Callable[..., None]:
    def method(self: Callback, context: CallbackContext) -> None:
        return None

    def method_of_both(
        self: Callback, context: object, state: object = None, *others: object, **keywords: object
    ) -> None:
        refuse_elsewhere(self, state)

    return _named(method if name in VALID_EVENTS - {"on_init_end"} else method_of_both, f"Callback.{name}", when)


def _hf_method(name: str, when: str) -> Callable[..., None]:
    def method(self: TrainerCallback, args: object, state: object, control: object, **kwargs: object) -> None:
        return None

    def first_method(self: TrainerCallback, args: object, state: object, control: object, **kwargs: object) -> None:
        refuse_elsewhere(self, state)

    def log_method(
        self: TrainerCallback,
        args: object,
        state: TrainerState,
        control: object,
        logs: Metrics | None = None,
        **kwargs: object,
    ) -> None:
        log_elsewhere(self, state, logs, args=args, control=control, **kwargs)

    elsewhere: dict[str, Callable[..., None]] = {
        "on_init_end": first_method,
        "on_train_begin": first_method,
        "on_log": log_method,
    }
    return _named(elsewhere.get(name, method), f"TrainerCallback.{name}", when)


def _named(method: Callable[..., None], name: str, when: str) -> Callable[..., None]:
    method.__name__, method.__doc__, method.__qualname__ = name.rpartition(".")[2], f"{when}.", name
    return method


for _event in EVENTS:
    setattr(Callback, _event.name, _context_method(_event.name, _event.when))

for _name in HF_EVENTS:
    _when = "; ".join(event.when for event in events_named(_name))
    setattr(TrainerCallback, _name, _hf_method(_name, _when))
    if _name not in VALID_EVENTS:
        setattr(Callback, _name, _context_method(_name, "Called by Hugging Face's Trainer alone, which is refused"))

TrainerCallback.on_push_begin = _hf_method(  # type: ignore[attr-defined]
    "on_push_begin", "An upload to the Hub is about to begin, on the ranks that call for it; only with `Trainer`"
)


class DefaultFlowCallback(TrainerCallback):
    """Sets in `control` what the arguments make due at a step or epoch: in a `CallbackHandler` made by hand, for
    subclasses and for calls by hand.

    Onstep's loop does this itself before it calls callbacks, so that it need not be among them.
    """

    def skips_event(self, name: str) -> bool:
        """In a loop, skip what a subclass does not override: the flags are set already.

        Args:
            name: the name of the event's method.
        """
        return getattr(type(self), name, None) is getattr(DefaultFlowCallback, name, None)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Set what is due at this step; returns `control`."""
        step, is_last = state.global_step, state.global_step >= state.max_steps
        is_evaluated = args.eval_strategy == "steps" and args.eval_delay <= step
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and _is_multiple(step, state.logging_steps)
        ):
            control.should_log = True
        if is_evaluated and (is_last or _is_multiple(step, state.eval_steps)):
            control.should_evaluate = True
        if args.save_strategy == "steps" and (is_last or _is_multiple(step, state.save_steps)):
            control.should_save = True
        if is_last:
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> TrainerControl:
        """Set what is due at the end of an epoch; returns `control`."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True
        return control


def _is_multiple(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
