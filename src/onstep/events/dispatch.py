"""Fires the events of a run: `dispatcher.on_step_end()` calls the listeners; without any it costs almost nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from onstep.events.context import CallbackContext, UserState
from onstep.events.events import EVENTS, TRAINING, VALID_EVENTS, Event
from onstep.events.manager import CallbackManager
from onstep.events.registration import Listeners, author_of
from onstep.events.settings import declared_commands, declared_settings, no_rollback_of
from onstep.events.views import OptimizerView, RunView, SchedulerView

if TYPE_CHECKING:
    from torch import nn


class Dispatcher:
    """Has a method for each event, named after it, that calls the run's callbacks with a new context.

    `dispatcher.on_train_step_end(step)` reads the event's own fields (`loss_dict`, `grad_norm`, ...) from attributes of
    its argument, the `source`, and only if there are listeners. Keyword arguments, the `fields`, override them; without
    a `source`, fields that are not given are None.

    Args:
        manager: the callbacks of the run; None for none.
        run: the state of the run, of which contexts have a view.
        model: the model chunks.
        optimizer: the optimizer of the run.
        scheduler: the scheduler of the run.
    """

    def __init__(
        self,
        manager: CallbackManager | None,
        run: RunView,
        model: list[nn.Module] | None = None,
        optimizer: OptimizerView | None = None,
        scheduler: SchedulerView | None = None,
    ) -> None:
        self.manager = manager
        self.on = Listeners() if manager is None else manager.listeners
        """The listeners of each event, for code that prepares something only if there are any."""
        self.run = run
        self._held = getattr(run, "entry_point", run)
        """The object that stores trainer, loaders and tokenizer as plain attributes; reading them calls no property."""
        self.model = model if model is not None else []
        self.optimizer = optimizer
        self.scheduler = scheduler
        self._guard = run.world if manager is not None and run.world.size > 1 else None
        self._user_state: UserState = {} if manager is None else manager.user_state
        if manager is not None:
            manager.follow(self)
        self.refresh()

    def refresh(self) -> None:
        """Shadow the method of each event without listeners on this rank by a no-op.

        The manager calls this whenever callbacks are added or removed.
        """
        is_main = self.manager is not None and self.run.world.rank == 0
        for event in VALID_EVENTS:
            if any(is_main or not listener.main_only for listener in getattr(self.on, event)):
                self.__dict__.pop(event, None)
            else:
                self.__dict__[event] = NO_OP
        if self.manager is not None:
            named = [(author_of(one), one) for one in self.manager.callbacks]
            self.run.control.declared = declared_settings(named)
            self.run.control.commands = declared_commands(self.manager.callbacks)
            self.run.control.no_rollback = no_rollback_of(self.manager.callbacks)

    def listens(self, event: str) -> bool:
        """Whether any callback listens to the event.

        Args:
            event: the name of the event, such as `on_train_step_end`.
        """
        return bool(getattr(self.on, event))

    def fire(self, event: str, **fields: object) -> None:
        """Fire the event with this name.

        Args:
            event: the name of the event, such as `on_train_step_end`.
            fields: the event's own fields by name.
        """
        getattr(self, event)(**fields)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., None]: ...


NO_OP: Callable[..., object] = "".format
"""Accepts anything and does nothing, without a Python-level call; replaces the method of an event without listeners."""


def _method(event: Event) -> Callable[..., None]:
    name, own_fields = event.name, event.own_fields
    without = [field for field in TRAINING if field not in event.fields]

    def fire(self: Dispatcher, source: object = None, /, **fields: object) -> None:
        run, manager = self.run, self.manager
        if manager is None:
            return
        for field in own_fields if source is not None else ():
            if field not in fields:
                fields[field] = getattr(source, field)
        held = self._held
        context = object.__new__(CallbackContext)  # __init__ would store 30 fields whose defaults are class attributes
        context.__dict__ = attributes = {
            "state": run,
            "model": self.model,
            "user_state": self._user_state,
            "control": run.control,
            "rank": run.world.rank,
            "trainer": held.trainer,
            "processing_class": held.processing_class,
            "event": name,
            "guard": self._guard,
            "callback_timer": manager.callback_timer,
            "hf_objects": {},
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "train_dataloader": held.train_dataloader,
            "eval_dataloader": held.eval_dataloader,
            **fields,
        }
        for field in without:
            attributes["hf_objects"][field if field != "scheduler" else "lr_scheduler"] = attributes.pop(field)
        call = manager.call_all if event.reaches_all else manager.call
        call(getattr(self.on, name), context)

    fire.__name__, fire.__doc__ = name, f"{event.when}."
    fire.__qualname__ = f"Dispatcher.{name}"
    return fire


for _event in EVENTS:
    setattr(Dispatcher, _event.name, _method(_event))
