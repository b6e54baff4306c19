"""Registers callbacks in any convention and tells them, in order of registration."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any

from onstep.events.context import CallbackContext
from onstep.events.moments import BY_NAME, MOMENTS, VALID_EVENTS, unknown_event
from onstep.events.registration import (
    Listener,
    Registration,
    author_of,
    function_registration,
    registration_of,
)

logger: logging.Logger = logging.getLogger(__name__)


class Listeners:
    """For each event, the tuple of its listeners. The loop tests one attribute; that test is the whole cost of an
    event that nobody listens to."""

    __slots__ = tuple(moment.name for moment in MOMENTS)

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, ())


class CallbackManager:
    """Holds the callbacks of a run and a `user_state` dictionary that they share.

    >>> manager = CallbackManager()
    >>> manager.register("on_eval_end", lambda context: print("Evaluation complete!"))
    """

    def __init__(self) -> None:
        self._user_state: dict[str, Any] = {}
        self._registrations: list[Registration] = []
        self._disabled: set[int] = set()
        self.listeners = Listeners()

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

        `before` and `after` name a registered callback, by instance, class or name; the default is the end.

        Raises:
            TypeError: when an object is no callback, or a method's signature fits no convention.
            ValueError: when `before` or `after` is not registered.
        """
        if isinstance(callback, (list, tuple)):
            for one in callback:
                self.add(one, before=before, after=after)
                after = one if after is not None else None
            return
        instance = callback() if isinstance(callback, type) else callback
        self._insert(registration_of(instance), before, after)

    def register(self, event_name: str, fn: Callable[..., Any], every: int = 1) -> None:
        """Register `fn(context)`, `fn()` or `fn(args, state, control, **kwargs)` for one event.

        `every` tells it at steps that are a multiple of `every` only; outside of steps, at every `every`-th telling.

        Raises:
            ValueError: for an unknown event, with the nearest name, or `every` < 1.
            TypeError: when `fn` is not callable or its signature fits no convention.
        """
        if event_name not in BY_NAME:
            raise unknown_event(event_name)
        if every < 1:
            raise ValueError(f"every must be >= 1, got {every}; pass 1 to be told each time.")
        self._insert(function_registration(event_name, fn, every), None, None)

    def remove(self, callback: Any) -> Any:
        """Take back the first registration of an instance, function or exact class; returns what was removed.

        Raises:
            ValueError: when nothing matches.
        """
        index = self._index_of(callback)
        registration = self._registrations.pop(index)
        self._rebuild()
        return registration.owner

    def list_callbacks(self, event_name: str) -> list[Callable[..., Any]]:
        """The callables registered for an event, as they were given, in the order in which they are told.

        Raises:
            ValueError: for an unknown event.
        """
        if event_name not in BY_NAME:
            raise unknown_event(event_name)
        return [listener.original for listener in getattr(self.listeners, event_name)]

    def has_callbacks(self, event_name: str) -> bool:
        """Whether anybody listens to an event; False for an unknown one."""
        return bool(getattr(self.listeners, event_name, ()))

    def explain(self, event_name: str) -> str:
        """The order in which an event's callbacks are told, one a line.

        Raises:
            ValueError: for an unknown event.
        """
        if event_name not in BY_NAME:
            raise unknown_event(event_name)
        moment = BY_NAME[event_name]
        also = "" if moment.hf_name == event_name else f" ({moment.hf_name})"
        lines = [f"{event_name}{also}: {moment.when}."]
        for number, listener in enumerate(getattr(self.listeners, event_name), start=1):
            where = " [rank 0 only]" if listener.main_only else ""
            method = getattr(listener.original, "__name__", type(listener.original).__name__)
            lines.append(f"  {number}. {listener.author}.{method}{where}")
        if len(lines) == 1:
            lines.append("  nobody listens")
        return "\n".join(lines)

    def fire(self, event_name: str, context: CallbackContext) -> None:
        """Tell every listener of an event, in order.

        An exception propagates at once, with a note that names callback and event, unless the callback's `on_error`
        says otherwise. `on_exception`, `on_train_end` and `on_run_end` reach every callback: the first error is raised after
        all were told, the others are attached as notes.

        Raises:
            ValueError: for an unknown event.
        """
        if event_name not in BY_NAME:
            raise unknown_event(event_name)
        listeners = getattr(self.listeners, event_name)
        context.event = event_name
        if BY_NAME[event_name].reaches_all:
            self._tell_all(listeners, context)
            return
        for listener in listeners:
            self._tell(listener, context)

    def _tell(self, listener: Listener, context: CallbackContext) -> None:
        if listener.main_only and context.rank != 0:
            return
        if self._disabled and id(listener.owner) in self._disabled:
            return
        control = context.control
        control.author, control.event = listener.author, context.event
        try:
            listener.handle(context)
        except Exception as error:
            error.add_note(f"raised by callback '{listener.author}' during '{context.event}'")
            if listener.on_error == "raise":
                raise
            self._tolerate(listener, context.event, error)
        finally:
            control.author, control.event = "the loop", ""

    def _tolerate(self, listener: Listener, event: str, error: Exception) -> None:
        consequence = "training goes on"
        if listener.on_error == "disable":
            self._disabled.add(id(listener.owner))
            consequence = "it is told nothing more"
        warnings.warn(
            f"callback '{listener.author}' raised {type(error).__name__}: {error} during '{event}'; {consequence}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _tell_all(self, listeners: Iterable[Listener], context: CallbackContext) -> None:
        first: BaseException | None = None
        for listener in listeners:
            try:
                self._tell(listener, context)
            except BaseException as error:  # noqa: BLE001 - every callback gets its ending; the first error is raised below
                if first is None:
                    first = error
                else:
                    first.add_note(f"then '{listener.author}' raised {type(error).__name__}: {error}")
        if first is not None:
            raise first

    def _insert(self, registration: Registration, before: Any, after: Any) -> None:
        position = len(self._registrations)
        if before is not None:
            position = self._index_of(before)
        elif after is not None:
            position = self._index_of(after) + 1
        self._registrations.insert(position, registration)
        self._rebuild()

    def _index_of(self, wanted: Any) -> int:
        for index, registration in enumerate(self._registrations):
            owner = registration.owner
            if owner is wanted or type(owner) is wanted or (isinstance(wanted, str) and author_of(owner) == wanted):
                return index
        known = ", ".join(author_of(owner) for owner in self.callbacks) or "none"
        raise ValueError(f"{wanted!r} is not registered; registered callbacks: {known}.")

    def _rebuild(self) -> None:
        for event in VALID_EVENTS:
            told = (one for registration in self._registrations for one in registration.listeners.get(event, ()))
            setattr(self.listeners, event, tuple(told))


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
