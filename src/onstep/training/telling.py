"""The loop's dispatcher of events, with the form `tell("on_step_end")` beside `tell.on_step_end()`."""

from __future__ import annotations

from onstep.events import Dispatcher


class Teller(Dispatcher):
    """Fires the events of a run; `tell.on` has the listeners of each."""

    def __call__(self, event: str, **fields: object) -> None:
        """Fire one event."""
        getattr(self, event)(**fields)
