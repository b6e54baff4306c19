"""Finds the event methods of a callback and turns them into listeners."""

from __future__ import annotations

import difflib
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from onstep.errors import CallbackError
from onstep.events.callback import Callback, DefaultFlowCallback, TrainerCallback
from onstep.events.context import CallbackContext
from onstep.events.events import EVENTS, HF_EVENTS, VALID_EVENTS, Event, event_named, events_named
from onstep.events.signatures import ACCEPTED, Handler, Style, as_handler, call_with_keywords, takes_context

_EVENT_NAMES = sorted(VALID_EVENTS | HF_EVENTS)
_ELSEWHERE = {
    "on_batch_begin": "on_step_begin",
    "on_batch_start": "on_step_begin",
    "on_batch_end": "on_step_end",
    "on_fit_start": "on_train_begin",
    "on_fit_end": "on_train_end",
    "on_validation_end": "on_evaluate",
    "on_before_optimizer_step": "on_pre_optimizer_step",
    "on_save_checkpoint": "on_save",
}
"""Events of Keras, Composer and Lightning whose names resemble none of ours, and ours."""


@dataclass(frozen=True, eq=False)
class Listener:
    """One handler of one event."""

    handle: Handler
    original: Callable[..., object]
    """The callable as the user gave it."""
    owner: object
    """The callback instance, or the function itself."""
    event_and_author: tuple[str, str]
    """The event, as the user's method calls it, and the author, which is the callback's name in messages."""
    main_only: bool
    on_error: str
    reads_weights: bool = True
    """Whether it may read weights, so that gathers in flight must end before it is called."""

    @property
    def gets_context(self) -> bool:
        """Whether it is called with the context itself, not with the arguments of Hugging Face's convention."""
        return self.handle is self.original

    @property
    def author(self) -> str:
        """Name of the callback in messages."""
        return self.event_and_author[1]


class Listeners:
    """For each event, the tuple of its listeners."""

    __slots__ = tuple(event.name for event in EVENTS)

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, ())

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Listener, ...]: ...


@dataclass(frozen=True, eq=False)
class Registration:
    """A callback or function, and its listeners by event name."""

    owner: object
    listeners: dict[str, list[Listener]]


def registration_of(callback: object, *, in_loop: bool = True) -> Registration:
    """Scan a callback instance for the event methods that it overrides.

    Args:
        in_loop: a loop fires the events; without one, a `DefaultFlowCallback` sets what is due.

    Raises:
        CallbackError: when it has no event method at all, or one whose signature matches no convention.
    """
    listeners: dict[str, list[Listener]] = {}
    style = _style_of(callback)
    for name, method in _event_methods(callback, in_loop):
        by_name: Style | None = None if name in VALID_EVENTS else "hf"
        for event in events_named(name):
            known = listeners.setdefault(event.name, [])
            if all(method != listener.original for listener in known):  # a method with both names is called once
                known.append(_listener(method, event, style or by_name, callback, name))
    misses = _near_misses(callback)
    if not listeners and style is None:
        raise CallbackError(
            f"{callback!r} is not a callback: it has no method named after an event, such as on_train_step_end(self, "
            f"context) or on_step_end(self, args, state, control, **kwargs). To register a function, use "
            f"manager.register(event_name, fn) with {ACCEPTED}. {' '.join(misses)}".rstrip()
        )
    for miss in misses:
        warnings.warn(miss, UserWarning, stacklevel=3)
    return Registration(callback, listeners)


def function_registration(event_name: str, fn: Callable[..., object], every: int) -> Registration:
    """Register a function for one event, called at every `every`-th step (or firing, for events outside of steps)."""
    event = event_named(event_name)
    listener = _listener(fn, event, None, fn)
    if every != 1:
        listener = replace(listener, handle=_every(listener.handle, event, every))
    return Registration(fn, {event.name: [listener]})


def own_event_listeners(callbacks: Iterable[object], name: str) -> tuple[Listener, ...]:
    """The methods called `name`, which is not an event of the loop, of all callbacks that have one.

    Those in Hugging Face's convention get all keywords of the context that they accept.
    """
    found = []
    for owner in callbacks:
        method = getattr(owner, name, None)
        if callable(method) and not inspect.isroutine(owner):
            by_keyword = _style_of(owner) != "context" and not takes_context(method)
            handle = partial(call_with_keywords, method) if by_keyword else method
            found.append(_listener_of(handle, method, (name, author_of(owner)), owner))
    return tuple(found)


def author_of(owner: object) -> str:
    """Name of a callback or function in messages."""
    if isinstance(owner, partial):
        return author_of(owner.func)
    name = getattr(owner, "name", None)
    if isinstance(name, str) and name and not inspect.isroutine(owner):
        return name
    return getattr(owner, "__qualname__", None) or type(owner).__name__


def _listener(fn: Callable[..., object], event: Event, style: Style | None, owner: object, name: str = "") -> Listener:
    return _listener_of(as_handler(fn, event, style), fn, (name or event.name, author_of(owner)), owner)


def _listener_of(
    handle: Handler, fn: Callable[..., object], event_and_author: tuple[str, str], owner: object
) -> Listener:
    main_only = _option(owner, "ranks", ("all", "main")) == "main"
    on_error = _option(owner, "on_error", ("raise", "warn", "disable"))
    return Listener(handle, fn, owner, event_and_author, main_only, on_error, _may_read_weights(owner))


def _may_read_weights(owner: object) -> bool:
    """Whether a callback may read weights: yes, unless it says otherwise, or a base class that is as much the user's.

    What Onstep says of its own callbacks does not hold for a user's subclass.
    """
    if "reads_weights" in getattr(owner, "__dict__", {}):
        return vars(owner)["reads_weights"] is not False
    cls = next((cls for cls in type(owner).__mro__ if vars(cls).get("reads_weights") is not None), None)
    if cls is None or vars(cls)["reads_weights"] is not False:
        return True
    return _is_own(cls) and not _is_own(type(owner))


def _is_own(cls: type) -> bool:
    return cls.__module__.startswith("onstep.")


def _option(owner: object, name: str, allowed: tuple[str, ...]) -> str:
    """A class attribute that controls the dispatch; the first of `allowed` if it is missing."""
    holder = owner.__self__ if inspect.ismethod(owner) else owner
    value = getattr(holder, name, allowed[0])
    if callable(value) or not (isinstance(value, str) or isinstance(holder, (Callback, TrainerCallback))):
        return allowed[0]  # an unrelated attribute of the same name
    if value not in allowed:
        raise CallbackError(f"{name} of {author_of(owner)} must be {' or '.join(map(repr, allowed))}, got {value!r}.")
    return str(value)


def _every(handle: Handler, event: Event, every: int) -> Handler:
    offset, calls = event.per_step, itertools.count(1)

    def at_times(context: CallbackContext) -> None:
        number = next(calls) if offset is None else context.state.train_state.step + offset
        if number % every == 0:
            handle(context)

    return at_times


def _is_marker(cls: type) -> bool:
    """Whether a class is a callback base class; that of transformers is recognized without importing it."""
    is_theirs = cls.__name__ == "TrainerCallback" and cls.__module__.split(".")[0] in ("transformers", "forgather")
    return is_theirs or cls in (Callback, TrainerCallback)


def _style_of(callback: object) -> Style | None:
    marker = next((cls for cls in type(callback).__mro__ if _is_marker(cls)), None)
    if marker is None:
        return None
    return "context" if marker is Callback else "hf"


def _event_methods(callback: object, in_loop: bool) -> Iterator[tuple[str, Callable[..., object]]]:
    may_skip = in_loop or not isinstance(callback, DefaultFlowCallback)
    for name in _EVENT_NAMES:
        if may_skip and isinstance(callback, (Callback, TrainerCallback)) and callback.skips_event(name):
            continue
        method = getattr(callback, name, None)
        if callable(method) and not _left_empty(callback, name, method):
            yield name, method


def _left_empty(callback: object, name: str, method: object) -> bool:
    """Whether `name` is a method that a base class only declares, so calling it would have no effect."""
    if name in getattr(callback, "__dict__", {}):
        return False
    for cls in type(callback).__mro__:
        if name in vars(cls):
            return _is_marker(cls) or (cls is not type(callback) and _is_empty(vars(cls)[name]))
    inner = getattr(method, "__self__", None)  # the callback delegates attributes to another object
    return inner is not None and inner is not callback and _left_empty(inner, name, method)


def _is_empty(attribute: Callable[..., object]) -> bool:
    """Whether a function's body is only a docstring, `pass`, `...` or `return None`."""
    code = getattr(inspect.unwrap(getattr(attribute, "__func__", attribute)), "__code__", None)
    if code is None:
        return False
    words = getattr(attribute, "__doc__", None)
    return code.co_code in _EMPTY_BODIES and not code.co_names and set(code.co_consts) <= {None, words}


def _bare() -> None: ...


def _documented() -> None:
    """Only a docstring."""


_EMPTY_BODIES = {_bare.__code__.co_code, _documented.__code__.co_code}


def _near_misses(callback: object) -> list[str]:
    """Warnings about methods whose names look like misspelled events."""
    markers = [cls for cls in type(callback).__mro__ if _is_marker(cls)]
    known = HF_EVENTS.union(VALID_EVENTS, *map(vars, markers))  # a base class may have events that Onstep does not fire
    found = []
    for name in dir(callback):
        if not name.startswith("on_") or name in known:
            continue
        near = (
            [_ELSEWHERE[name]] if name in _ELSEWHERE else difflib.get_close_matches(name, _EVENT_NAMES, n=1, cutoff=0.8)
        )
        method = getattr(callback, name, None) if near else None
        if callable(method) and not _left_empty(callback, name, method):
            rule = "is not an event and is never called by the loop"
            found.append(f"{author_of(callback)}.{name} {rule}; did you mean {near[0]!r}?")
    return found
