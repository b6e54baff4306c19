"""Fires the events of a run: `fire.on_step_end()` calls everybody who listens, and does next to nothing without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from onstep.events.context import CallbackContext
from onstep.events.events import MOMENTS, TRAINING, VALID_EVENTS, Moment
from onstep.events.manager import CallbackManager, Listeners
from onstep.events.views import RunView

if TYPE_CHECKING:
    from torch import nn


class Dispatcher:
    """Has a method for each event, named after it, that calls the run's callbacks with a fresh context.

    `dispatcher.on_train_step_end(step)` reads the event's own fields (`loss_dict`, `grad_norm`, ...) from attributes of
    `step`, and only where somebody listens. Fields given as keywords are taken as they are; without `step`, those that
    are not given are None.
    """

    def __init__(
        self,
        manager: CallbackManager | None,
        run: RunView,
        model: list[nn.Module] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.manager = manager
        self.on = Listeners() if manager is None else manager.listeners
        """For each event, who listens to it: for those who have work to do only then."""
        self.run = run
        self._held: Any = getattr(run, "door", run)
        """Where trainer, loaders and tokenizer are attributes, so that reading them calls no property."""
        self.model = model if model is not None else []
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._user_state: dict[str, Any] = {} if manager is None else manager.user_state
        if manager is not None:
            manager.follow(self)
        self.refresh()

    def refresh(self) -> None:
        """Put a no-op in front of the method of each event that nobody on this rank listens to.

        The manager calls this whenever callbacks were added or removed.
        """
        is_main = self.manager is not None and self.run.world.rank == 0
        for event in VALID_EVENTS:
            if any(is_main or not listener.main_only for listener in getattr(self.on, event)):
                self.__dict__.pop(event, None)
            else:
                self.__dict__[event] = NOTHING

    def fire(self, event: str, **fields: object) -> None:
        """Fire the event of that name."""
        getattr(self, event)(**fields)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...


NOTHING: Callable[..., Any] = "".format
"""Takes anything and does nothing, without a Python call: what stands in for an event that nobody listens to."""


def _method(moment: Moment) -> Callable[..., None]:
    name, own_fields = moment.name, moment.own_fields
    without = [field for field in TRAINING if field not in moment.fields]

    def fire(self: Dispatcher, source: object = None, /, **fields: Any) -> None:
        run, manager = self.run, self.manager
        if manager is None:
            return
        for field in own_fields if source is not None else ():
            if field not in fields:
                fields[field] = getattr(source, field)
        held = self._held
        context = object.__new__(CallbackContext)  # its __init__ would store 30 fields; the class has their defaults
        context.__dict__ = attributes = {
            "state": run,
            "model": self.model,
            "user_state": self._user_state,
            "control": run.control,
            "rank": run.world.rank,
            "trainer": held.trainer,
            "processing_class": held.processing_class,
            "event": name,
            "callback_clock": manager.callback_clock,
            "hf_objects": {},
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "train_dataloader": held.train_dataloader,
            "eval_dataloader": held.eval_dataloader,
            **fields,
        }
        for field in without:
            attributes["hf_objects"][field if field != "scheduler" else "lr_scheduler"] = attributes.pop(field)
        call = manager.call_all if moment.reaches_all else manager.call
        call(getattr(self.on, name), context)

    fire.__name__, fire.__doc__ = name, f"{moment.when}."
    fire.__qualname__ = f"Dispatcher.{name}"
    return fire


for _moment in MOMENTS:
    setattr(Dispatcher, _moment.name, _method(_moment))
