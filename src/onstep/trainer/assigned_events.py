"""Lets a run call the `call_event` that a library has assigned to `trainer.callback_handler`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from onstep.events import CallbackContext, CallbackManager
from onstep.events.events import VALID_EVENTS, events_named
from onstep.events.registration import Listener

_FIRED = frozenset(
    (
        *("on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end", "on_step_begin", "on_substep_end"),
        *(
            "on_pre_optimizer_step",
            "on_optimizer_step",
            "on_step_end",
            "on_evaluate",
            "on_predict",
            "on_save",
            "on_log",
        ),
        *("on_prediction_step", "on_init_end"),
    )
)
"""The events that Hugging Face's loop fires by `call_event`."""
_PASSED = ("logs", "metrics")
"""What it passes besides arguments, state and control."""


class AssignedEvents:
    """Calls a function in place of the callbacks of users and libraries in Hugging Face's convention.

    Onstep's own callbacks, and those in the context convention, are called as before.

    Args:
        manager: the callbacks of the Trainer.
        function: called as `function(event, args, state, control, **kwargs)`; may return a control.
    """

    def __init__(self, manager: CallbackManager, function: Callable[..., object]) -> None:
        self._manager, self._function = manager, function
        self._is_ended = False
        self._event: str | None = None
        """The event for which the function is being called."""
        self._replaced: dict[str, list[Listener]] = {}
        """The listeners in whose place the function is called, by event."""
        manager.follow(self)
        manager.replace(manager.callbacks)

    def refresh(self) -> None:
        """Put the function in the place of the listeners that it calls; the manager calls this after changes."""
        for event in () if self._is_ended else VALID_EVENTS:
            self._replaced[event] = []
            listeners = tuple(self._with_function(event, getattr(self._manager.listeners, event)))
            setattr(self._manager.listeners, event, listeners)

    def call(self, event: str, *args: object, **kwargs: object) -> object:
        """Call the function for an event; meanwhile, `callbacks` are those that it is to call."""
        outer, self._event = self._event, event
        try:
            return self._function(event, *args, **kwargs)
        finally:
            self._event = outer

    @property
    def callbacks(self) -> list[object] | None:
        """The callbacks that the function is to call; None outside of it."""
        if self._event is None:
            return None
        users = [one for one in self._manager.callbacks if not _is_own(one)]
        return [one for one in users if callable(getattr(one, self._event, None))]

    def replaced(self, event: str) -> tuple[Listener, ...] | None:
        """The listeners that the function replaces, while it is called for this event; None at any other time."""
        is_called = self._event is not None and any(one.name == event for one in events_named(self._event))
        return tuple(self._replaced[event]) if is_called else None

    def end(self) -> None:
        """Call the callbacks themselves again."""
        self._is_ended = True
        self._manager.replace(self._manager.callbacks)

    def _with_function(self, event: str, listeners: tuple[Listener, ...]) -> Iterator[Listener]:
        named = set()
        for listener in listeners:
            name = listener.event_and_author[0]
            is_users = not _is_own(listener.owner) and callable(getattr(listener.owner, name, None))
            if name not in _FIRED or listener.gets_context or not is_users:
                yield listener
                continue
            self._replaced[event].append(listener)
            if name not in named:
                named.add(name)
                yield Listener(partial(self._handle, name), self.call, self, (name, "call_event"), False, "raise")

    def _handle(self, name: str, context: CallbackContext) -> None:
        keywords = context.keywords or context.event_keywords()
        passed = {key: keywords[key] for key in _PASSED if key in keywords}
        context.control.merge(self.call(name, keywords["args"], keywords["state"], keywords["control"], **passed))


def _is_own(callback: object) -> bool:
    return type(callback).__module__.partition(".")[0] == "onstep"
