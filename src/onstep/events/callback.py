"""The two base classes; their event methods derive from the table of moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from onstep.events.context import CallbackContext
from onstep.events.events import HF_EVENTS, MOMENTS, moments_named


class Callback:
    """Base of context-style callbacks: override `on_<moment>(self, context)` for the moments you need.

    Only overridden methods are registered. Class attributes steer the dispatch:

    - `ranks`: "all" tells every rank, "main" rank 0 only;
    - `on_error`: "raise" ends the run, "warn" goes on, "disable" goes on without this callback;
    - `shows_progress`: True where the callback reports progress itself, so that `pretrain()` prints no console line.
    """

    ranks: Literal["all", "main"] = "all"
    on_error: Literal["raise", "warn", "disable"] = "raise"
    shows_progress: bool = False

    def skips_event(self, name: str) -> bool:
        """Whether the method `name`, as this callback is configured, has nothing to do; asked when it is registered.

        An event that all its listeners skip costs nothing.
        """
        return False


class TrainerCallback:
    """Base of Hugging Face-style callbacks: `on_step_end(self, args, state, control, **kwargs)` and its siblings.

    Handlers are called with keywords and may declare any subset as long as they take `**kwargs`; who calls the first
    three something else, or takes `*args`, gets those by position. They return None or a `TrainerControl`. Every moment
    of the table can be handled, by its Hugging Face name or by its context name. Class attributes as in `Callback`.
    """

    ranks: Literal["all", "main"] = "all"
    on_error: Literal["raise", "warn", "disable"] = "raise"
    shows_progress: bool = False

    @property
    def name(self) -> str:
        """What messages call this callback; override it to tell two instances of a class apart."""
        return type(self).__name__

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


for _moment in MOMENTS:
    setattr(Callback, _moment.name, _context_method(_moment.name, _moment.when))

for _name in HF_EVENTS:
    setattr(TrainerCallback, _name, _hf_method(_name, "; ".join(moment.when for moment in moments_named(_name))))
