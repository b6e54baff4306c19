"""Adapts a torch scheduler to the loop, which steps it after updates, or after evaluations if it follows a metric."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from onstep.errors import ConfigError

logger = logging.getLogger(__name__)


def follows_metric(scheduler: object) -> bool:
    """Whether `scheduler.step` requires a metric, as `ReduceLROnPlateau` and transformers' `GreedyLR` do."""
    step = getattr(scheduler, "step", None)
    metrics = inspect.signature(step).parameters.get("metrics") if callable(step) else None
    return metrics is not None and metrics.default is metrics.empty


class TorchSchedulerAdapter:
    """Steps a torch `LRScheduler` once after each applied update; its state is passed through unchanged.

    Its other attributes, such as `get_last_lr` and `last_epoch`, are those of the torch scheduler.

    Raises:
        ConfigError: if the scheduler requires a metric, which an optimizer step does not have.
    """

    def __init__(self, torch_scheduler: LRScheduler) -> None:
        if follows_metric(torch_scheduler):
            raise ConfigError(
                f"{type(torch_scheduler).__name__} requires a metric, which an optimizer step does not have; "
                f"step it in a callback after evaluation and pass no scheduler, or use onstep.Trainer, which does so"
            )
        self.torch_scheduler: Any = torch_scheduler
        self.num_steps = 0
        """Number of samples trained on since this adapter was created."""
        self._rates: list[float] = []
        self._left_at: Any = getattr(torch_scheduler, "last_epoch", None)
        self._is_told = False

    def __getattr__(self, name: str) -> Any:
        if name == "torch_scheduler":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.torch_scheduler, name)

    def step(self, increment: int) -> None:
        """Step the torch scheduler once, regardless of the number of samples."""
        self._note_step(increment)
        self._step()

    def rates_before_last_step(self) -> list[float]:
        """The learning rates before the last `step`, by group: those of the last update."""
        return self._rates

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The learning rate that the torch scheduler wrote into `param_group`."""
        return float(param_group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """The torch scheduler's own state."""
        state: dict[str, Any] = self.torch_scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Pass `state_dict` to the torch scheduler.

        Raises:
            ConfigError: for the state of `OptimizerParamScheduler`, which has another form.
        """
        if "lr_decay_style" in state_dict:
            raise ConfigError(
                f"the checkpoint has Onstep's own schedule, {state_dict['lr_decay_style']}, which cannot continue as "
                f"torch's {type(self.torch_scheduler).__name__}; keep the schedule, or start a new run from the weights"
            )
        self.torch_scheduler.load_state_dict(state_dict)
        self._left_at = getattr(self.torch_scheduler, "last_epoch", None)

    def _step(self, *metric: float) -> None:
        """Step the torch scheduler, and say so if something else has stepped it since."""
        scheduler = self.torch_scheduler
        if not self._is_told and getattr(scheduler, "last_epoch", None) != self._left_at:
            self._is_told = True
            logger.warning(
                "%s was stepped by other code than the training loop, which steps it itself: last_epoch was %s and is "
                "%s, so the schedule runs ahead; remove scheduler.step() from your callback or loss, or step a "
                "scheduler that is not passed to the training",
                type(scheduler).__name__,
                self._left_at,
                scheduler.last_epoch,
            )
        scheduler.step(*metric)
        self._left_at = getattr(scheduler, "last_epoch", None)

    def _note_step(self, increment: int) -> None:
        self.num_steps += increment
        groups = getattr(getattr(self.torch_scheduler, "optimizer", None), "param_groups", [])
        self._rates = [float(group["lr"]) for group in groups]


class MetricSchedulerAdapter(TorchSchedulerAdapter):
    """Steps a scheduler that follows a metric after evaluations (`observe`), and not after updates."""

    def __init__(self, scheduler: Any) -> None:
        self.torch_scheduler = scheduler
        self.num_steps = 0
        self._rates = []
        self._left_at = getattr(scheduler, "last_epoch", None)
        self._is_told = False

    def step(self, increment: int) -> None:
        """Leave the learning rates as they are."""
        self._note_step(increment)

    def observe(self, metric: float) -> None:
        """Step the scheduler with the metric of an evaluation; the same on all ranks."""
        self._step(metric)
