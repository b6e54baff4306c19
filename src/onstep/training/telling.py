"""The loop's dispatcher of events, with the form `tell("on_step_end")` beside `tell.on_step_end()`."""

from __future__ import annotations

from typing import Any

from onstep.events import CallbackManager, Dispatcher
from onstep.training.run import Run


class Teller(Dispatcher):
    """Fires the events of a run; `tell.on` has the listeners of each."""

    def __init__(
        self,
        manager: CallbackManager | None,
        state: Run,
        model: list[Any] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        super().__init__(manager, state, model, optimizer, scheduler)
        self.state = state

    def __call__(self, event: str, **fields: Any) -> None:
        """Fire one event."""
        getattr(self, event)(**fields)
