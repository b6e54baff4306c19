"""How a callback's methods are found, and what is remembered of each registration."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from onstep.events.callback import Callback, TrainerCallback
from onstep.events.context import CallbackContext
from onstep.events.moments import BY_NAME, HF_EVENTS, VALID_EVENTS, Moment, moments_named
from onstep.events.signatures import ACCEPTED, Handler, Style, as_handler

_EVENT_NAMES = sorted(VALID_EVENTS | HF_EVENTS)


@dataclass(frozen=True, eq=False)
class Listener:
    """One handler of one event."""

    handle: Handler
    original: Callable[..., Any]
    """The callable as the user gave it."""
    owner: Any
    """The callback instance, or the function itself."""
    author: str
    main_only: bool
    on_error: str


@dataclass(frozen=True, eq=False)
class Registration:
    """A callback, or a function, and the listeners that it brought: event name to listeners."""

    owner: Any
    listeners: dict[str, list[Listener]]


def registration_of(callback: Any) -> Registration:
    """Scan a callback instance for the event methods that it overrides.

    Raises:
        TypeError: when it has no event method at all, or one whose signature fits no convention.
    """
    listeners: dict[str, list[Listener]] = {}
    style = _style_of(callback)
    for name, method in _event_methods(callback):
        for moment in moments_named(name):
            listeners.setdefault(moment.name, []).append(_listener(method, moment, style, callback))
    _warn_of_near_misses(callback)
    if not listeners and style is None:
        raise TypeError(
            f"{callback!r} is not a callback: it has no method named after an event, such as on_train_step_end(self, "
            f"context) or on_step_end(self, args, state, control, **kwargs). To register a function, use "
            f"manager.register(event_name, fn) with {ACCEPTED}."
        )
    return Registration(callback, listeners)


def function_registration(event_name: str, fn: Callable[..., Any], every: int) -> Registration:
    """A function registered for one event, told at every `every`-th step (or telling, outside of steps)."""
    moment = BY_NAME[event_name]
    listener = _listener(fn, moment, None, fn)
    if every != 1:
        handle = _every(listener.handle, moment, every)
        listener = Listener(handle, fn, fn, listener.author, listener.main_only, listener.on_error)
    return Registration(fn, {event_name: [listener]})


def author_of(owner: Any) -> str:
    """What messages call a callback or function."""
    name = getattr(owner, "name", None)
    if isinstance(name, str) and not inspect.isfunction(owner):
        return name
    return getattr(owner, "__qualname__", None) or type(owner).__name__


def _listener(fn: Callable[..., Any], moment: Moment, style: Style | None, owner: Any) -> Listener:
    ranks = getattr(owner, "ranks", "all")
    if ranks not in ("all", "main"):
        raise TypeError(f"ranks of {author_of(owner)} must be 'all' or 'main', got {ranks!r}.")
    on_error = getattr(owner, "on_error", "raise")
    if callable(on_error) or on_error is None:
        on_error = "raise"  # somebody else's method of that name
    if on_error not in ("raise", "warn", "disable"):
        raise TypeError(f"on_error of {author_of(owner)} must be 'raise', 'warn' or 'disable', got {on_error!r}.")
    return Listener(as_handler(fn, moment, style), fn, owner, author_of(owner), ranks == "main", on_error)


def _every(handle: Handler, moment: Moment, every: int) -> Handler:
    if moment.per_step is not None:
        offset = moment.per_step

        def at_steps(context: CallbackContext) -> None:
            if (context.state.train_state.step + offset) % every == 0:
                handle(context)

        return at_steps
    told = 0

    def at_tellings(context: CallbackContext) -> None:
        nonlocal told
        told += 1
        if told % every == 0:
            handle(context)

    return at_tellings


def _is_hf_base(cls: type) -> bool:
    """`transformers.TrainerCallback` and its kin, recognised without importing transformers."""
    return cls.__name__ == "TrainerCallback" and cls.__module__.split(".")[0] in ("transformers", "forgather")


def _is_marker(cls: type) -> bool:
    return cls in (Callback, TrainerCallback) or _is_hf_base(cls)


def _style_of(callback: Any) -> Style | None:
    for cls in type(callback).__mro__:
        if cls is Callback:
            return "context"
        if cls is TrainerCallback or _is_hf_base(cls):
            return "hf"
    return None


def _event_methods(callback: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in _EVENT_NAMES:
        method = getattr(callback, name, None)
        if callable(method) and not _left_empty(callback, name):
            yield name, method


def _left_empty(callback: Any, name: str) -> bool:
    """Whether `name` is a method that some base class merely declares: nobody would notice if it were told."""
    if name in getattr(callback, "__dict__", {}):
        return False
    for cls in type(callback).__mro__:
        if name in vars(cls):
            return _is_marker(cls) or (cls is not type(callback) and _is_empty(vars(cls)[name]))
    return False


def _is_empty(attribute: Any) -> bool:
    """Whether a function's body is nothing but a docstring, `pass`, `...` or `return None`."""
    code = getattr(inspect.unwrap(getattr(attribute, "__func__", attribute)), "__code__", None)
    if code is None:
        return False
    return code.co_code in _EMPTY_BODIES and not code.co_names and set(code.co_consts) <= {None, _doc(attribute)}


def _doc(attribute: Any) -> str | None:
    return getattr(attribute, "__doc__", None)


def _bare() -> None: ...


def _documented() -> None:
    """Only words."""


_EMPTY_BODIES = {_bare.__code__.co_code, _documented.__code__.co_code}


def _warn_of_near_misses(callback: Any) -> None:
    for name in dir(type(callback)):
        if not name.startswith("on_") or name in HF_EVENTS or name in VALID_EVENTS:
            continue
        near = difflib.get_close_matches(name, _EVENT_NAMES, n=1, cutoff=0.8)
        if near and callable(getattr(callback, name, None)):
            warnings.warn(
                f"{author_of(callback)}.{name} is no event and will never be told; did you mean {near[0]!r}?",
                UserWarning,
                stacklevel=4,
            )
