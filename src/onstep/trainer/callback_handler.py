"""Hugging Face's `CallbackHandler`, which scripts call as `trainer.callback_handler`, over a `CallbackManager`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence
from typing import Any, TypeVar, cast, overload

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


class CallbackList(MutableSequence[object]):
    """The callbacks of a manager as a list: changing it changes which callbacks are called."""

    def __init__(self, manager: CallbackManager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        return len(self._manager.callbacks)

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> object:
        return self._manager.callbacks[index]

    def __setitem__(self, index: Any, value: object) -> None:
        callbacks = self._manager.callbacks
        callbacks[index] = value
        self._manager.replace(callbacks)

    def __delitem__(self, index: int | slice) -> None:
        callbacks = self._manager.callbacks
        del callbacks[index]
        self._manager.replace(callbacks)

    def insert(self, index: int, value: object) -> None:
        """Add a callback, or a callback class, before the one at `index`."""
        callbacks = self._manager.callbacks
        callbacks.insert(index, value)
        self._manager.replace(callbacks)

    def __iter__(self) -> Iterator[object]:
        return iter(self._manager.callbacks)

    def __add__(self, other: Iterable[object]) -> list[object]:
        return [*self, *other]

    def __radd__(self, other: Iterable[object]) -> list[object]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, CallbackList)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._manager.callbacks)


class CallbackHandler(TrainerCallback):
    """Calls callbacks of both conventions, with Hugging Face's interface: `on_<event>` and `call_event`.

    Args:
        callbacks: instances or classes.
        model: passed to the callbacks, as are the objects that follow; all are attributes that may be set.
    """

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
    def callbacks(self) -> CallbackList:
        """The callbacks in the order in which they are called; changing the list changes it."""
        return CallbackList(self.callback_manager)

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[object]) -> None:
        self.callback_manager.replace(list(callbacks))

    @property
    def callback_list(self) -> str:
        """The class of each callback, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    def add_callback(self, callback: object) -> None:
        """Add a callback, or a callback class."""
        self.callback_manager.add(callback)

    def pop_callback(self, callback: object) -> object:
        """Remove and return the first callback that equals this one, or is an instance of this class; None if none."""
        for one in self.callbacks:
            if isinstance(one, callback) if isinstance(callback, type) else one == callback:
                return self.callback_manager.remove(one)
        return None

    def remove_callback(self, callback: object) -> None:
        """Remove the same callback as `pop_callback`.

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

    _assigned: AssignedEvents | None = None

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
    def callbacks(self) -> Any:
        """As in `CallbackHandler`; for an assigned `call_event` those that it is to call."""
        called = None if self._assigned is None else self._assigned.callbacks
        return CallbackList(self.callback_manager) if called is None else called

    @callbacks.setter
    def callbacks(self, callbacks: Iterable[object]) -> None:
        self.callback_manager.replace(list(callbacks))

    @property
    def callback_manager(self) -> CallbackManager:  # type: ignore[override]
        """The callbacks of the Trainer."""
        manager: CallbackManager = self._of.callback_manager
        return manager

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
