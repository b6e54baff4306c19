"""Defines `CallbackManager`, which registers callbacks of any convention and calls them in order of registration."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from inspect import ismethod
from typing import Protocol
from weakref import WeakSet

from onstep.errors import CallbackError, named_text, of_exhausted_iterator
from onstep.events.callback_timer import CallbackTimer
from onstep.events.context import CallbackContext, UserState
from onstep.events.control import Control
from onstep.events.events import VALID_EVENTS, Event, event_named
from onstep.events.registration import (
    Listener,
    Listeners,
    Registration,
    author_of,
    function_registration,
    registration_of,
)
from onstep.events.signatures import Handler
from onstep.events.views import WorldView
from onstep.processes.heartbeat import HEARTBEAT

logger: logging.Logger = logging.getLogger(__name__)


class _Follower(Protocol):
    def refresh(self) -> None:
        """The listeners of some event have changed."""


class _Followers(WeakSet[_Follower]):
    """The objects notified when a manager's callbacks change; a copy of the manager starts with none."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


class CallbackManager:
    """Holds the callbacks of a run and a `user_state` dictionary that they share.

    Callbacks may add or remove callbacks while running; changes take effect at the next event.

    >>> manager = CallbackManager()
    >>> manager.register("on_eval_end", lambda context: print("Evaluation complete!"))

    Args:
        in_loop: a loop fires the events; without one, a `DefaultFlowCallback` sets what is due.
    """

    def __init__(self, *, in_loop: bool = True) -> None:
        self._in_loop = in_loop
        self._user_state: UserState = {}
        self._registrations: list[Registration] = []
        self._disabled: dict[int, object] = {}
        """Disabled callbacks by id; keeping the objects alive prevents reuse of their ids."""
        self._followers = _Followers()
        self._leaves_out_init_end = False
        self.listeners = Listeners()
        self.gathers: Callable[[], object] | None = None
        """Waits for weights that are being gathered, while a training has any; called before a listener that may read
        weights."""
        self.callback_timer = CallbackTimer()
        """Measures the time spent in each callback, while it is started."""

    @property
    def user_state(self) -> UserState:
        """Mutable dictionary that lives as long as the manager; neither saved nor cleared between runs."""
        return self._user_state

    @property
    def events(self) -> frozenset[str]:
        """Names that `register` accepts."""
        return VALID_EVENTS

    @property
    def callbacks(self) -> list[object]:
        """The registered callbacks and functions, in order."""
        return [registration.owner for registration in self._registrations]

    def add(self, callback: object, *, before: object = None, after: object = None) -> None:
        """Register a callback, a callback class (instantiated without arguments), or a list or tuple of them.

        `before` and `after` name a registered callback, by instance, class or name; by default, callbacks are appended.
        If one callback of a list is invalid, none is registered.

        Args:
            callback: an instance, a class, or a list or tuple of them.

        Raises:
            CallbackError: when an object is not a callback, or a method's signature matches no convention.
            ValueError: when `before` or `after` is not registered, or they contradict the existing order.
        """
        registrations = []
        for instance in _instances(callback):
            registrations.append(registration_of(instance, in_loop=self._in_loop))
        position = self._position(before, after)
        self._registrations[position:position] = registrations
        self._rebuild()

    def register(self, event_name: str, fn: Callable[..., object], every: int = 1) -> None:
        """Register `fn(context)`, `fn()` or `fn(args, state, control, **kwargs)` for one event.

        With `every=n`, it is called only at steps that are multiples of n; for events outside of steps, every n-th time
        the event fires.

        Args:
            event_name: the name of the event, such as `on_train_step_end`.

        Raises:
            ValueError: for an unknown event, suggesting the nearest name, or `every` < 1.
            CallbackError: when `fn` is not callable or its signature matches no convention.
        """
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be an integer >= 1, got {every!r}; pass 1 to be called each time.")
        self._registrations.append(function_registration(event_name, fn, every))
        self._rebuild()

    def remove(self, callback: object) -> object:
        """Remove the first registration of an instance, function or exact class; returns what was removed.

        Args:
            callback: an instance, a function or a class.

        Raises:
            ValueError: when nothing matches.
        """
        index = self._index_of(callback)
        owner = self._registrations.pop(index).owner
        if all(registration.owner is not owner for registration in self._registrations):
            self._disabled.pop(id(owner), None)
        self._rebuild()
        return owner

    def replace(self, callbacks: list[object]) -> None:
        """Register exactly these, in this order: owners that are registered already, and new callbacks or classes.

        Args:
            callbacks: the callbacks, in the order in which they are called.
        """
        known = list(self._registrations)
        kept: list[Registration] = []
        for callback in callbacks:
            index = next((i for i, one in enumerate(known) if one.owner is callback), None)
            new = (registration_of(instance, in_loop=self._in_loop) for instance in _instances(callback))
            kept += [known.pop(index)] if index is not None else new
        self._registrations[:] = kept
        self._rebuild()

    def list_callbacks(self, event_name: str) -> list[Callable[..., object]]:
        """The callables registered for an event, as they were given, in calling order.

        Args:
            event_name: the name of the event, such as `on_train_step_end`.

        Raises:
            ValueError: for an unknown event.
        """
        return [listener.original for listener in self._listeners_of(event_named(event_name))]

    def has_callbacks(self, event_name: str) -> bool:
        """Whether an event has listeners; False for an unknown event.

        Args:
            event_name: the name of the event, such as `on_train_step_end`.
        """
        return event_name in VALID_EVENTS and bool(getattr(self.listeners, event_name))

    def explain(self, event_name: str) -> str:
        """Describe the order in which an event's callbacks are called, one per line.

        Args:
            event_name: the name of the event, such as `on_train_step_end`.

        Raises:
            ValueError: for an unknown event.
        """
        event = event_named(event_name)
        also = "" if event.hf_name == event.name else f" ({event.hf_name})"
        listeners = self._listeners_of(event)
        lines = [f"  {number}. {self._entry(listener)}" for number, listener in enumerate(listeners, start=1)]
        return "\n".join([f"{event.name}{also}: {event.when}.", *(lines or ["  no listeners"])])

    def fire(self, event_name: str, context: object) -> None:
        """Call every listener of an event, in order.

        The context may be any object: a listener of the context convention gets the object itself, one of Hugging
        Face's the attributes that it has.

        An exception propagates immediately, with a note that names the callback and the event, unless the callback's
        `on_error` says otherwise. `on_exception`, `on_train_end` and `on_run_end` reach every callback: the first error
        is raised after all have been called, with the others attached as notes.

        Args:
            event_name: the name of the event, such as `on_train_step_end`.
            context: what listeners are called with.

        Raises:
            ValueError: for an unknown event.
        """
        event = event_named(event_name)
        # a Mock(spec=CallbackContext) claims to be an instance
        if not (isinstance(context, CallbackContext) and issubclass(type(context), CallbackContext)):
            self._fire_with(event, context)
            return
        outer = context.event  # a callback may fire another event with the same context
        context.event = event.name
        context.callback_timer = self.callback_timer
        context.keywords = None
        call = self.call_all if event.reaches_all else self.call
        try:
            call(self._listeners_of(event), context)
        finally:
            context.event, context.keywords = outer or event.name, None

    def _fire_with(self, event: Event, given: object) -> None:
        """`fire` with an object of another class than `CallbackContext`."""
        context = CallbackContext(getattr(given, "state", None), getattr(given, "model", []), self._user_state)  # type: ignore[arg-type]
        for name, kind in (("control", Control), ("rank", int)):
            if isinstance(getattr(given, name, None), kind):
                setattr(context, name, getattr(given, name))
        for name in {"optimizer", "scheduler", *event.fields}:
            setattr(context, name, getattr(given, name, None))
        context.event, context.callback_timer = event.name, self.callback_timer
        call = self.call_all if event.reaches_all else self.call
        call(tuple(_with_object(listener, given) for listener in self._listeners_of(event)), context)

    def call(self, listeners: tuple[Listener, ...], context: CallbackContext) -> None:
        """Call listeners in order; `context.event` must be their event.

        Args:
            listeners: what is called, in order.
        """
        disabled, clock, is_main, guard = self._disabled, self.callback_timer, context.rank == 0, context.guard
        gathers = self.gathers
        voice = vars(context.control)  # bypasses its __setattr__, which handles the flags
        outer = voice["author"], voice["event"], HEARTBEAT.callback  # a callback may fire an event itself
        try:
            for listener in listeners:
                if (listener.main_only and not is_main) or (disabled and id(listener.owner) in disabled):
                    continue
                if gathers is not None and listener.reads_weights:
                    gathers()
                called = listener.event_and_author
                if HEARTBEAT.is_followed:
                    HEARTBEAT.announce(called)
                HEARTBEAT.callback = called
                voice["event"], voice["author"] = called
                HEARTBEAT.beats += 1
                try:
                    handle = listener.handle if guard is None or not listener.main_only else _guarded(listener, guard)
                    if clock.is_running:
                        clock.call(listener.author, handle, context)
                    else:
                        handle(context)
                except StopIteration as error:  # it would end a generator that fires the event
                    raised = of_exhausted_iterator(f"callback '{listener.author}'", error)
                    if not self._tolerates(listener, raised):
                        raise raised from error
                except BaseException as error:
                    if not self._tolerates(listener, error) and not (guard is not None and guard.postpone(error)):
                        raise
        finally:
            if HEARTBEAT.is_followed:
                HEARTBEAT.announce(outer[-1])
            voice["author"], voice["event"], HEARTBEAT.callback = outer

    def call_all(self, listeners: tuple[Listener, ...], context: CallbackContext) -> None:
        """Call every listener even after an error; the first error is raised at the end.

        Args:
            listeners: what is called, in order.
            context: the state of the run at the event.
        """
        first: BaseException | None = None
        for listener in listeners:
            try:
                self.call((listener,), context)
            except BaseException as error:  # noqa: BLE001 - all callbacks are called; the first error is raised below
                if first is None:
                    first = error
                else:
                    first.add_note(f"then '{listener.author}' raised {named_text(error)}")
        if first is not None:
            raise first

    def follow(self, follower: _Follower) -> None:
        """Call `refresh()` of an object, as long as it lives, whenever callbacks are added or removed.

        Args:
            follower: an object with `refresh()`, of which only a weak reference is kept.
        """
        self._followers.add(follower)

    def _listeners_of(self, event: Event) -> tuple[Listener, ...]:
        listeners: tuple[Listener, ...] = getattr(self.listeners, event.name)
        return listeners

    def _entry(self, listener: Listener) -> str:
        entry = listener.author
        if listener.owner is not listener.original:
            entry += "." + getattr(listener.original, "__name__", type(listener.original).__name__)
        ranks = " [rank 0 only]" if listener.main_only else ""
        return entry + ranks + (" [disabled]" if id(listener.owner) in self._disabled else "")

    def _tolerates(self, listener: Listener, error: BaseException) -> bool:
        """Whether training continues after an error, with a warning; adds a note naming callback and event."""
        event, author = listener.event_and_author
        error.add_note(f"raised by callback '{author}' during '{event}'")
        if listener.on_error == "raise" or not isinstance(error, Exception):
            return False
        consequence = "training continues"
        if listener.on_error == "disable":
            self._disabled[id(listener.owner)] = listener.owner
            consequence = "it will not be called again"
        warnings.warn(
            f"callback '{author}' raised {named_text(error)} during '{event}'; {consequence}",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def _position(self, before: object, after: object) -> int:
        position = len(self._registrations) if before is None else self._index_of(before)
        if after is None:
            return position
        earliest = self._index_of(after) + 1
        if before is not None and position < earliest:
            raise ValueError(
                f"Cannot add before {before!r} and after {after!r}: they are called in the opposite order."
            )
        return earliest

    def _index_of(self, wanted: object) -> int:
        for index, registration in enumerate(self._registrations):
            owner = registration.owner
            if owner is wanted or type(owner) is wanted or (isinstance(wanted, str) and author_of(owner) == wanted):
                return index
            if ismethod(owner) and owner == wanted:  # each access of `obj.method` creates a new object
                return index
        known = ", ".join(author_of(owner) for owner in self.callbacks) or "none"
        raise ValueError(f"{wanted!r} is not registered; registered callbacks: {known}.")

    def take_init_end(self) -> tuple[Listener, ...]:
        """The `on_init_end` of callbacks in Hugging Face's convention, for a constructor to fire; no loop calls it."""
        self._leaves_out_init_end = True
        self._rebuild()
        return tuple(one for one in self._registered("on_init_end") if not one.gets_context)

    def _registered(self, event: str) -> Iterator[Listener]:
        return (one for registration in self._registrations for one in registration.listeners.get(event, ()))

    def _rebuild(self) -> None:
        for event in VALID_EVENTS:
            leaves_out = event == "on_init_end" and self._leaves_out_init_end
            listening = (one for one in self._registered(event) if one.gets_context or not leaves_out)
            setattr(self.listeners, event, tuple(listening))
        for follower in self._followers:
            follower.refresh()


def _guarded(listener: Listener, guard: WorldView) -> Handler:
    """The handler of a listener that only rank 0 calls, in which collectives raise."""

    def handle(context: CallbackContext) -> None:
        with guard.main_only():
            listener.handle(context)

    return handle


def _with_object(listener: Listener, given: object) -> Listener:
    """A listener that gets `given` in place of the context, if it is one of the context convention."""
    if not listener.gets_context:
        return listener
    return replace(listener, handle=lambda context: listener.original(given))


def _instances(callback: object) -> Iterator[object]:
    if isinstance(callback, (list, tuple)):
        for one in callback:
            yield from _instances(one)
    else:
        yield _instance(callback) if isinstance(callback, type) else callback


def _instance(callback: type) -> object:
    try:
        return callback()
    except TypeError as error:
        name = callback.__name__
        raise CallbackError(
            f"The callback class {name} cannot be instantiated without arguments: {error}; pass an instance, "
            f"{name}(...)."
        ) from error


def normalize_callbacks(callbacks: object) -> CallbackManager | None:
    """Return None and managers unchanged; add anything else to a new manager.

    Args:
        callbacks: None, a manager, a callback or class, or a list of them.
    """
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(callback_manager: CallbackManager | None, event_name: str) -> bool:
    """Whether there is a manager with listeners for this event.

    Args:
        callback_manager: the callbacks of the run, or None.
        event_name: the name of the event.
    """
    return callback_manager is not None and callback_manager.has_callbacks(event_name)
