"""Defines `Callback` and `TrainerCallback`, the base classes whose event methods are generated from the event table;
and Hugging Face's `DefaultFlowCallback`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from onstep.events.context import CallbackContext
from onstep.events.events import EVENTS, HF_EVENTS, events_named
from onstep.events.settings import Setting


class Callback:
    """Base class of context-style callbacks: override `on_<event>(self, context)` for the events you need.

    Only overridden methods are registered. Class attributes control the dispatch:

    - `ranks`: "all" calls the callback on every rank, "main" on rank 0 only;
    - `on_error`: "raise" ends the run, "warn" continues, "disable" continues without this callback;
    - `shows_progress`: True if the callback reports progress itself, so that `pretrain()` adds none that does.
    - `settable`: attributes that can be set during the run, as `<name of the callback>.<attribute>`: on all ranks at
      one step, recorded, saved in checkpoints, and set again when the run resumes;
    - `commands`: names of commands that its `on_command` carries out, and one line about each.
    """

    ranks: Literal["all", "main"] = "all"
    on_error: Literal["raise", "warn", "disable"] = "raise"
    shows_progress: bool = False
    settable: ClassVar[Mapping[str, Setting]] = {}
    commands: ClassVar[Mapping[str, str]] = {}

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

    @property
    def name(self) -> str:
        """Name of this callback in messages: that of its class; set it to distinguish two instances."""
        return str(self.__dict__.get("name", type(self).__name__))

    @name.setter
    def name(self, name: str) -> None:
        self.__dict__["name"] = name

    def skips_event(self, name: str) -> bool:
        """As in `Callback`."""
        return False


def _context_method(name: str, when: str) -> Callable[..., None]:
    def method(self: Callback, context: CallbackContext) -> None:
        return None

    method.__name__, method.__doc__ = name, f"{when}."
    method.__qualname__ = f"Callback.{name}"
    return method


def _hf_method(name: str, when: str) -> Callable[..., None]:
    def method(self: TrainerCallback, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        return None

    method.__name__, method.__doc__ = name, f"{when}."
    method.__qualname__ = f"TrainerCallback.{name}"
    return method


for _event in EVENTS:
    setattr(Callback, _event.name, _context_method(_event.name, _event.when))

for _name in HF_EVENTS:
    setattr(TrainerCallback, _name, _hf_method(_name, "; ".join(event.when for event in events_named(_name))))

TrainerCallback.on_push_begin = _hf_method(  # type: ignore[attr-defined]
    "on_push_begin", "Never fired by the loop, since nothing is uploaded; part of Hugging Face's interface"
)


class DefaultFlowCallback(TrainerCallback):
    """Sets in `control` what the arguments make due at a step or epoch: in a `CallbackHandler` made by hand, for
    subclasses and for calls by hand.

    Onstep's loop does this itself before it calls callbacks, so that it need not be among them.
    """

    def skips_event(self, name: str) -> bool:
        """In a loop, skip what a subclass does not override: the flags are set already."""
        return getattr(type(self), name, None) is getattr(DefaultFlowCallback, name, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
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

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
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
