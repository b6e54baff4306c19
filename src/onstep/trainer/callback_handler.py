"""Hugging Face's `CallbackHandler`, which scripts call as `trainer.callback_handler`, over a `CallbackManager`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

from torch import nn

from onstep.callbacks import ProgressCallback
from onstep.config import TrainingArguments
from onstep.errors import ConfigError
from onstep.events import CallbackContext, CallbackManager, Control, TrainerCallback, TrainerState
from onstep.events.events import BY_NAME, HF_EVENTS, events_named
from onstep.events.registration import own_event_listeners
from onstep.events.views import OptimizerView, SchedulerView
from onstep.trainer.assigned_events import AssignedEvents
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.call import Session
from onstep.trainer.callback_list import CallbackList

_CLEARED = {
    "on_train_begin": ("should_training_stop",),
    "on_epoch_begin": ("should_epoch_stop",),
    "on_step_begin": ("should_log", "should_evaluate", "should_save"),
    "on_evaluate": ("should_evaluate",),
    "on_save": ("should_save",),
    "on_log": ("should_log",),
}
"""The flags that firing an event by name clears first."""
_BY_POSITION = {"on_evaluate": ("metrics",), "on_predict": ("metrics",), "on_log": ("logs",)}


Returned = TypeVar("Returned")


class CallbackHandler(TrainerCallback):
    """Calls callbacks of both conventions, with Hugging Face's interface: `on_<event>` and `call_event`.

    Args:
        callbacks: instances or classes.
        model: passed to the callbacks, as are the objects that follow; all are attributes that may be set.
        processing_class: the tokenizer or processor.
        optimizer: the optimizer.
        lr_scheduler: the scheduler.
    """

    _assigned: AssignedEvents | None = None

    def __init__(
        self,
        callbacks: Iterable[object],
        model: nn.Module,
        processing_class: object,
        optimizer: OptimizerView | None,
        lr_scheduler: SchedulerView | None,
    ) -> None:
        self.callback_manager = CallbackManager(in_loop=False)
        for callback in callbacks:
            self.add_callback(callback)
        self.model, self.processing_class = model, processing_class
        self.optimizer, self.lr_scheduler = optimizer, lr_scheduler
        self.train_dataloader: object = None
        self.eval_dataloader: object = None

    @property
    def callbacks(self) -> Any:
        """The callbacks in the order in which they are called; changing the list changes it.

        While a run calls a `call_event` of the user's, those that it is to call.
        """
        called = None if self._assigned is None else self._assigned.callbacks
        return CallbackList(self.callback_manager) if called is None else called

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[object]) -> None:
        self.callback_manager.replace(list(callbacks))

    @property
    def callback_list(self) -> str:
        """The class of each callback, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: object) -> None:
        """Add a callback, or a callback class.

        Args:
            callback: a callback, or its class.
        """
        self.callback_manager.add(callback)

    def pop_callback(self, callback: object) -> object:
        """Remove and return the first callback that equals this one, or is an instance of this class; None if none.

        Args:
            callback: a callback, or its class.
        """
        for one in self.callbacks:
            if isinstance(one, callback) if isinstance(callback, type) else one == callback:
                return self.callback_manager.remove(one)
        return None

    def remove_callback(self, callback: object) -> None:
        """Remove the same callback as `pop_callback`.

        Args:
            callback: a callback, or its class.

        Raises:
            ValueError: if this instance is not a callback.
        """
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(f"{callback!r} is not among the callbacks: {', '.join(self.callback_list.split())}.")

    def call_event(
        self, event: str, args: TrainingArguments, state: TrainerState, control: Returned, **kwargs: object
    ) -> Returned:
        """Call every callback that has a method named `event`, which may be a name of your own; returns `control`.

        Callbacks in Hugging Face's convention get `args`, `state`, `control`, the objects of this handler and `kwargs`;
        those in the context convention get a context, on which `kwargs` are attributes. What a callback asks of
        `control` while a run's loop calls it is a request in the callback's name.
        """
        own = control if isinstance(control, Control) else _as_control(control)
        known = events_named(event)
        name = known[0].name if known else event
        context = self._context(name, args, state, own)
        vars(context).update(kwargs)
        context.keywords = {**(context.event_keywords() if name in BY_NAME else context.hf_keywords()), **kwargs}
        manager = self.callback_manager
        listeners = getattr(manager.listeners, name) if known else own_event_listeners(manager.callbacks, event)
        if self._assigned is not None and (replaced := self._assigned.replaced(name)) is not None:
            listeners = replaced
        manager.call(listeners, context)
        if own is not control:
            vars(control).update({flag: getattr(own, flag) for flag in vars(control) if hasattr(own, flag)})
            vars(control).update(own.user_attributes())
        return control

    def _context(self, name: str, args: TrainingArguments, state: TrainerState, control: Control) -> CallbackContext:
        run: Any = _RunAsGiven(self._run, args, state, control)
        return CallbackContext(
            run,
            self.model if isinstance(self.model, list) else [self.model],
            self.callback_manager.user_state,
            optimizer=self.optimizer,
            scheduler=self.lr_scheduler,
            event=name,
            control=control,
            rank=0 if getattr(state, "is_world_process_zero", True) else max(getattr(state, "rank", 1), 1),
            train_dataloader=self.train_dataloader,
            eval_dataloader=self.eval_dataloader,
            processing_class=self.processing_class,
            trainer=self._trainer,
            callback_timer=self.callback_manager.callback_timer,
        )

    @property
    def _run(self) -> object:
        return None

    @property
    def _trainer(self) -> object:
        return None


def _event_method(event: str) -> Callable[..., object]:
    cleared, names = _CLEARED.get(event, ()), _BY_POSITION.get(event, ())

    def fire(
        self: CallbackHandler,
        args: TrainingArguments,
        state: TrainerState,
        control: object,
        *given: object,
        **kwargs: object,
    ) -> object:
        for flag in cleared:
            setattr(control, flag, False)
        return self.call_event(event, args, state, control, **dict(zip(names, given, strict=False)), **kwargs)

    fire.__name__, fire.__doc__ = event, f"Call the callbacks' `{event}`; returns `control`."
    fire.__qualname__ = f"CallbackHandler.{event}"
    return fire


for _name in HF_EVENTS | {"on_push_begin"}:
    setattr(CallbackHandler, _name, _event_method(_name))


class _RunAsGiven:
    """The run as callbacks in the context convention see it, with the objects that an event is fired with."""

    def __init__(self, run: object, args: TrainingArguments, trainer_state: TrainerState, control: Control) -> None:
        self._run, self.args, self.trainer_state, self.control = run, args, trainer_state, control

    def __getattr__(self, name: str) -> Any:
        if self._run is None:
            raise AttributeError(
                f"context.state.{name} requires a run, and none has started; use context.trainer_state"
            )
        return getattr(self._run, name)


def _as_control(control: object) -> Control:
    """A control that records requests, with the flags and attributes of one made by hand."""
    own = Control()
    own.merge(control)
    own.requests.clear()
    return own


def _held(in_session: Callable[[Session], tuple[object, str]], name: str) -> Any:
    """An object that the session's loop passes to callbacks; outside of one, what was set, else the Trainer's."""

    def get(self: TrainerCallbackHandler) -> object:
        if self._trainer.session is not None:
            return getattr(*in_session(self._trainer.session))
        return self._given.get(name, getattr(self._trainer, name, None))

    def put(self: TrainerCallbackHandler, value: object) -> None:
        if self._trainer.session is None:
            self._given[name] = value
        else:
            setattr(*in_session(self._trainer.session), value)

    return property(get, put)


def pop_default(trainer: BaseTrainer, callback: object) -> object:
    """Remove and return the callback that has the place of one of Hugging Face's defaults; None for any other class.

    Hugging Face's Trainer has a `PrinterCallback` with `disable_tqdm`, else a `ProgressCallback`.

    Raises:
        ConfigError: for `DefaultFlowCallback`, unless it has been added.
    """
    name, callbacks = getattr(callback, "__name__", ""), trainer.callback_manager.callbacks
    if name not in ("DefaultFlowCallback", "PrinterCallback", "ProgressCallback"):
        return None
    if not isinstance(callback, type) or any(isinstance(one, callback) for one in callbacks):
        return None
    if name == "DefaultFlowCallback":
        raise ConfigError(
            "DefaultFlowCallback cannot be removed: the loop itself decides what is due. For a flow of your own, set "
            "logging_strategy, eval_strategy and save_strategy to 'no', and the flags of control in a callback."
        )
    in_place = [one for one in callbacks if isinstance(one, ProgressCallback)]
    if not in_place or (name == "PrinterCallback") != bool(trainer.args.disable_tqdm):
        return None
    return trainer.callback_manager.remove(in_place[0])


class TrainerCallbackHandler(CallbackHandler):
    """The handler of a Trainer: its callbacks are those that the loop calls, with the loop's current objects."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._of, self._given = trainer, dict[str, object]()

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; a `call_event` that is assigned is what the run calls from then on."""
        if name != "call_event":
            super().__setattr__(name, value)
            return
        if self._assigned is not None:
            self._assigned.end()
        is_method = getattr(value, "__func__", None) is type(self).call_event
        self._assigned = None if is_method else AssignedEvents(self.callback_manager, cast(Any, value))
        self.__dict__["call_event"] = value if self._assigned is None else self._assigned.call

    @property
    def callback_manager(self) -> CallbackManager:  # type: ignore[override]
        """The callbacks of the Trainer."""
        manager: CallbackManager = self._of.callback_manager
        return manager

    def adopt(self, handler: CallbackHandler) -> None:
        """Take the callbacks of a handler of the user's, and let a run call its `call_event`, or `on_<event>`.

        Its other objects are those of the loop from now on.
        """
        self.callback_manager.replace(list(handler.callbacks))
        handler.callback_manager = self.callback_manager

        def call(event: str, *args: Any, **kwargs: Any) -> object:
            self.lend_to(handler)
            fire = getattr(handler, event) if _is_users(handler, event) else partial(handler.call_event, event)
            return fire(*args, **kwargs)

        is_called = any(_is_users(handler, name) for name in ("call_event", *HF_EVENTS))
        method: object = call if is_called else MethodType(type(self).call_event, self)
        self.__setattr__("call_event", method)
        handler._assigned = self._assigned

    def lend_to(self, handler: CallbackHandler) -> None:
        """Set the objects of a handler to those that the loop passes to callbacks."""
        for name in ("model", "optimizer", "lr_scheduler", "processing_class", "train_dataloader", "eval_dataloader"):
            setattr(handler, name, getattr(self, name))

    def fire_init_end(self) -> None:
        """Call `on_init_end` of the callbacks in Hugging Face's convention, which is done once, by the constructor."""
        listeners = self.callback_manager.take_init_end()
        if listeners:
            context = self._context("on_init_end", self._of.args, self._of.state, self._of.control)  # type: ignore[attr-defined]
            context.keywords = context.event_keywords()
            self.callback_manager.call(listeners, context)

    model = _held(lambda session: (session.notify, "model"), "model")
    optimizer = _held(lambda session: (session.notify, "optimizer"), "optimizer")
    lr_scheduler = _held(lambda session: (session.notify, "scheduler"), "lr_scheduler")
    processing_class = _held(lambda session: (session.state.entry_point, "processing_class"), "processing_class")
    train_dataloader = _held(lambda session: (session.state.entry_point, "train_dataloader"), "train_dataloader")
    eval_dataloader = _held(lambda session: (session.state.entry_point, "eval_dataloader"), "eval_dataloader")

    def pop_callback(self, callback: object) -> object:
        """As in `CallbackHandler`; the defaults of Hugging Face's Trainer stand for those that have their place here.

        Raises:
            ConfigError: for `DefaultFlowCallback`, since the loop itself decides what is due.
        """
        return pop_default(self._of, callback) or super().pop_callback(callback)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: Returned, *given: object, **kwargs: object
    ) -> Returned:
        """As in `CallbackHandler`, unless a checkpoint that an override has just saved fired it."""
        if self._of.has_fired_on_save:
            self._of.has_fired_on_save = False
            control.should_save = False  # type: ignore[attr-defined]
            return control
        fired: Returned = super().on_save(args, state, control, *given, **kwargs)  # type: ignore[misc]
        return fired

    @property
    def _run(self) -> object:
        return self._of.global_state

    @property
    def _trainer(self) -> Any:
        return self._of


def _is_users(handler: CallbackHandler, name: str) -> bool:
    """Whether a user's class, or an assignment, replaces a method of a handler."""
    return name in vars(handler) or getattr(type(handler), name) is not getattr(CallbackHandler, name)
