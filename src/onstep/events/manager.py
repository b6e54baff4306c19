"""Registers callbacks in any convention and tells them, in order of registration."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from inspect import ismethod
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

from onstep.events.callback_timer import CallbackClock
from onstep.events.context import CallbackContext
from onstep.events.events import MOMENTS, VALID_EVENTS, Moment, moment_of
from onstep.events.registration import (
    Listener,
    Registration,
    author_of,
    function_registration,
    registration_of,
)
from onstep.heartbeat import PULSE

logger: logging.Logger = logging.getLogger(__name__)


class Listeners:
    """For each event, the tuple of its listeners."""

    __slots__ = tuple(moment.name for moment in MOMENTS)

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, ())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Listener, ...]: ...


class _Follower(Protocol):
    def refresh(self) -> None:
        """Somebody listens to an event, or nobody any longer."""


class _Followers(WeakSet[_Follower]):
    """Who is told of changes of a manager; a copy of the manager has none of them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class CallbackManager:
    """Holds the callbacks of a run and a `user_state` dictionary that they share.

    A callback may add and remove callbacks while it is told; that counts from the next telling on.

    >>> manager = CallbackManager()
    >>> manager.register("on_eval_end", lambda context: print("Evaluation complete!"))
    """

    def __init__(self) -> None:
        self._user_state: dict[str, Any] = {}
        self._registrations: list[Registration] = []
        self._disabled: dict[int, Any] = {}
        """By id; the objects are kept, so that no id is given out again."""
        self._followers = _Followers()
        self.listeners = Listeners()
        self.callback_clock = CallbackClock()
        """Measures how long each callback takes, while somebody has started it."""

    @property
    def user_state(self) -> dict[str, Any]:
        """Mutable dictionary, the same object for the life of the manager; not saved and not cleared between runs."""
        return self._user_state

    @property
    def events(self) -> frozenset[str]:
        """Names that `register` takes."""
        return VALID_EVENTS

    @property
    def callbacks(self) -> list[Any]:
        """The registered callbacks and functions, in order."""
        return [registration.owner for registration in self._registrations]

    def add(self, callback: Any, *, before: Any = None, after: Any = None) -> None:
        """Register a callback, a callback class (made without arguments), or a list or tuple of them.

        `before` and `after` name a registered callback, by instance, class or name; the default is the end. Of a list,
        all or, after an error, none are registered.

        Raises:
            TypeError: when an object is no callback, or a method's signature fits no convention.
            ValueError: when `before` or `after` is not registered, or both leave no place.
        """
        registrations = []
        for instance in _instances(callback):
            registrations.append(registration_of(instance))
        position = self._position(before, after)
        self._registrations[position:position] = registrations
        self._rebuild()

    def register(self, event_name: str, fn: Callable[..., Any], every: int = 1) -> None:
        """Register `fn(context)`, `fn()` or `fn(args, state, control, **kwargs)` for one event.

        `every` tells it at steps that are a multiple of `every` only; outside of steps, at every `every`-th telling.

        Raises:
            ValueError: for an unknown event, with the nearest name, or `every` < 1.
            TypeError: when `fn` is not callable or its signature fits no convention.
        """
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"every must be a whole number >= 1, got {every!r}; pass 1 to be told each time.")
        self._registrations.append(function_registration(event_name, fn, every))
        self._rebuild()

    def remove(self, callback: Any) -> Any:
        """Take back the first registration of an instance, function or exact class; returns what was removed.

        Raises:
            ValueError: when nothing matches.
        """
        index = self._index_of(callback)
        owner = self._registrations.pop(index).owner
        if all(registration.owner is not owner for registration in self._registrations):
            self._disabled.pop(id(owner), None)
        self._rebuild()
        return owner

    def list_callbacks(self, event_name: str) -> list[Callable[..., Any]]:
        """The callables registered for an event, as they were given, in the order in which they are told.

        Raises:
            ValueError: for an unknown event.
        """
        return [listener.original for listener in self._listeners_of(moment_of(event_name))]

    def has_callbacks(self, event_name: str) -> bool:
        """Whether anybody listens to an event; False for an unknown one."""
        return event_name in VALID_EVENTS and bool(getattr(self.listeners, event_name))

    def explain(self, event_name: str) -> str:
        """The order in which an event's callbacks are told, one a line.

        Raises:
            ValueError: for an unknown event.
        """
        moment = moment_of(event_name)
        also = "" if moment.hf_name == moment.name else f" ({moment.hf_name})"
        listeners = self._listeners_of(moment)
        lines = [f"  {number}. {self._entry(listener)}" for number, listener in enumerate(listeners, start=1)]
        return "\n".join([f"{moment.name}{also}: {moment.when}.", *(lines or ["  nobody listens"])])

    def fire(self, event_name: str, context: CallbackContext) -> None:
        """Tell every listener of an event, in order.

        An exception propagates at once, with a note that names callback and event, unless the callback's `on_error`
        says otherwise. `on_exception`, `on_train_end` and `on_run_end` reach every callback: the first error is raised
        after all were told, the others are attached as notes.

        Raises:
            ValueError: for an unknown event.
        """
        moment = moment_of(event_name)
        outer = context.event  # a callback may fire another event with the context that it was handed
        context.event = moment.name
        context.callback_clock = self.callback_clock
        context.keywords = None
        call = self.call_all if moment.reaches_all else self.call
        try:
            call(self._listeners_of(moment), context)
        finally:
            context.event, context.keywords = outer or moment.name, None

    def call(self, listeners: tuple[Listener, ...], context: CallbackContext) -> None:
        """Call listeners in order, with a context that names their event."""
        disabled, clock, is_main = self._disabled, self.callback_clock, context.rank == 0
        voice = vars(context.control)  # past its __setattr__, which is there for the flags
        outer = voice["author"], voice["event"], PULSE.told  # a callback may itself make somebody fire
        voice["event"] = context.event
        try:
            for listener in listeners:
                if (listener.main_only and not is_main) or (disabled and id(listener.owner) in disabled):
                    continue
                PULSE.told = listener.told
                voice["author"] = listener.told[1]
                PULSE.beats += 1
                try:
                    if clock.is_running:
                        _call_timed(clock, listener, context)
                    else:
                        listener.handle(context)
                except BaseException as error:
                    if not self._tolerates(listener, error):
                        raise
        finally:
            voice["author"], voice["event"], PULSE.told = outer

    def call_all(self, listeners: tuple[Listener, ...], context: CallbackContext) -> None:
        """Call every listener, also after an error: the first error is raised at the end."""
        first: BaseException | None = None
        for listener in listeners:
            try:
                self.call((listener,), context)
            except BaseException as error:  # noqa: BLE001 - every callback gets its ending; the first error is raised below
                if first is None:
                    first = error
                else:
                    first.add_note(f"then '{listener.author}' raised {type(error).__name__}: {error}")
        if first is not None:
            raise first

    def follow(self, follower: _Follower) -> None:
        """Call `refresh()` of an object, for as long as it lives, whenever callbacks were added or removed."""
        self._followers.add(follower)

    def _listeners_of(self, moment: Moment) -> tuple[Listener, ...]:
        listeners: tuple[Listener, ...] = getattr(self.listeners, moment.name)
        return listeners

    def _entry(self, listener: Listener) -> str:
        entry = listener.author
        if listener.owner is not listener.original:
            entry += "." + getattr(listener.original, "__name__", type(listener.original).__name__)
        ranks = " [rank 0 only]" if listener.main_only else ""
        return entry + ranks + (" [disabled]" if id(listener.owner) in self._disabled else "")

    def _tolerates(self, listener: Listener, error: BaseException) -> bool:
        """Whether training goes on after an error, with a warning; a note on it names callback and event."""
        event, author = listener.told
        error.add_note(f"raised by callback '{author}' during '{event}'")
        if listener.on_error == "raise" or not isinstance(error, Exception):
            return False
        consequence = "training goes on"
        if listener.on_error == "disable":
            self._disabled[id(listener.owner)] = listener.owner
            consequence = "it is told nothing more"
        warnings.warn(
            f"callback '{author}' raised {type(error).__name__}: {error} during '{event}'; {consequence}",
            RuntimeWarning,
            stacklevel=3,
        )
        return True

    def _position(self, before: Any, after: Any) -> int:
        position = len(self._registrations) if before is None else self._index_of(before)
        if after is None:
            return position
        earliest = self._index_of(after) + 1
        if before is not None and position < earliest:
            raise ValueError(
                f"There is no place before {before!r} and after {after!r}: they are told the other way round."
            )
        return earliest

    def _index_of(self, wanted: Any) -> int:
        for index, registration in enumerate(self._registrations):
            owner = registration.owner
            if owner is wanted or type(owner) is wanted or (isinstance(wanted, str) and author_of(owner) == wanted):
                return index
            if ismethod(owner) and owner == wanted:  # each look at `obj.method` makes a new object
                return index
        known = ", ".join(author_of(owner) for owner in self.callbacks) or "none"
        raise ValueError(f"{wanted!r} is not registered; registered callbacks: {known}.")

    def _rebuild(self) -> None:
        for event in VALID_EVENTS:
            told = (one for registration in self._registrations for one in registration.listeners.get(event, ()))
            setattr(self.listeners, event, tuple(told))
        for follower in self._followers:
            follower.refresh()


def _call_timed(clock: CallbackClock, listener: Listener, context: CallbackContext) -> None:
    clock.enter(listener.author)
    try:
        listener.handle(context)
    finally:
        clock.leave()


def _instances(callback: Any) -> Iterator[Any]:
    if isinstance(callback, (list, tuple)):
        for one in callback:
            yield from _instances(one)
    else:
        yield callback() if isinstance(callback, type) else callback


def normalize_callbacks(callbacks: Any) -> CallbackManager | None:
    """None for None, a manager as it is, anything else added to a new manager."""
    if callbacks is None or isinstance(callbacks, CallbackManager):
        return callbacks
    manager = CallbackManager()
    manager.add(callbacks)
    return manager


def should_fire(callback_manager: CallbackManager | None, event_name: str) -> bool:
    """Whether there is a manager with somebody who listens to this event."""
    return callback_manager is not None and callback_manager.has_callbacks(event_name)
