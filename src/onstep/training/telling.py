"""How the loop tells its callbacks: one test when nobody listens, a fresh context when somebody does."""

from __future__ import annotations

from typing import Any

from onstep.events import CallbackContext, CallbackManager
from onstep.events.manager import Listeners
from onstep.events.moments import BY_NAME
from onstep.training.state import GlobalState

_TRAINING_FIELDS = ("optimizer", "scheduler", "train_dataloader", "eval_dataloader")


class Teller:
    """Tells the moments of a run to its callback manager.

    The loop writes `if on.on_step_end: tell("on_step_end")`, where `on` is `tell.on`: that test is the whole cost of a
    moment that nobody listens to.
    """

    def __init__(
        self,
        manager: CallbackManager | None,
        state: GlobalState,
        model: list[Any] | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
    ) -> None:
        self.manager = manager
        self.on = Listeners() if manager is None else manager.listeners
        self.state = state
        self.model = model if model is not None else []
        self.optimizer = optimizer
        self.scheduler = scheduler

    def __call__(self, event: str, **fields: Any) -> None:
        """Tell one moment. A no-op when nobody listens."""
        manager = self.manager
        if manager is None or not getattr(self.on, event):
            return
        manager.fire(event, self._context(event, fields))

    def _context(self, event: str, fields: dict[str, Any]) -> CallbackContext:
        state, manager = self.state, self.manager
        assert manager is not None
        training = {
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "train_dataloader": state.train_dataloader,
            "eval_dataloader": state.eval_dataloader,
        }
        known_here = BY_NAME[event].fields
        return CallbackContext(
            state=state,
            model=self.model,
            user_state=manager.user_state,
            control=state.control,
            rank=state.world.rank,
            trainer=state.trainer,
            processing_class=state.processing_class,
            hf_objects={
                "optimizer": self.optimizer,
                "lr_scheduler": self.scheduler,
                "train_dataloader": state.train_dataloader,
                "eval_dataloader": state.eval_dataloader,
            },
            **{name: training[name] for name in _TRAINING_FIELDS if name in known_here},
            **fields,
        )
