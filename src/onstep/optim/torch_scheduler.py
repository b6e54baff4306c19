"""Adapts a torch scheduler to the loop, which steps it after updates, or after evaluations if it follows a metric."""

from __future__ import annotations

import inspect
import logging
import math
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, OneCycleLR, SequentialLR

from onstep.errors import ConfigError, named_text

logger = logging.getLogger(__name__)


def follows_metric(scheduler: object) -> bool:
    """Whether `scheduler.step` requires a metric, as `ReduceLROnPlateau` and transformers' `GreedyLR` do."""
    step = getattr(scheduler, "step", None)
    metrics = inspect.signature(step).parameters.get("metrics") if callable(step) else None
    return metrics is not None and metrics.default is metrics.empty


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Check that a scheduler is an object that changes the rates of `optimizer`, if it says whose rates it changes.

    Args:
        scheduler: the scheduler.

    Raises:
        ConfigError: if it does not.
    """
    kind = type(scheduler).__name__
    if isinstance(scheduler, (type, Optimizer)) or not callable(getattr(scheduler, "step", None)):
        given = f"the class {scheduler.__name__} itself" if isinstance(scheduler, type) else f"a {kind}"
        raise ConfigError(
            f"the scheduler must be an object with a step() method, got {given}; pass one of the optimizer, such as "
            f"StepLR(optimizer, step_size=10), or None for a constant rate"
        )
    groups = getattr(getattr(scheduler, "optimizer", None), "param_groups", None)
    if groups and {id(group) for group in groups}.isdisjoint(map(id, optimizer.param_groups)):
        raise ConfigError(
            f"the scheduler {kind} changes the rates of another optimizer than the one that is trained with, whose "
            f"rate would stay as it is; create it with that optimizer"
        )


def check_length(scheduler: Any, step: int, max_steps: int | None) -> None:
    """Check that a scheduler that fails after a number of steps can be stepped from `step` to the end of the run.

    Args:
        scheduler: the scheduler.
        max_steps: steps of the whole run; None if unknown.

    Raises:
        ConfigError: if it cannot.
    """
    scheduler = getattr(scheduler, "torch_scheduler", scheduler)
    end = _end_of(scheduler)
    if max_steps is None or end == math.inf:
        return
    counts = scheduler._schedulers[0] if isinstance(scheduler, ChainedScheduler) else scheduler
    position = counts.last_epoch
    if position + max_steps - step > end:
        raise ConfigError(
            f"{type(scheduler).__name__} ends after {end} steps (total_steps) and is at step {position}, but the run "
            f"is at step {step} of {max_steps}: create it with total_steps for all {position + max_steps - step} "
            f"steps, or train fewer; one that continues from a checkpoint has the total_steps that were saved"
        )


def _end_of(scheduler: Any) -> float:
    """The number of steps after which `step()` fails."""
    if isinstance(scheduler, OneCycleLR):
        return scheduler.total_steps
    if not isinstance(scheduler, (ChainedScheduler, SequentialLR)):
        return math.inf
    ends = [_end_of(one) for one in scheduler._schedulers]
    if isinstance(scheduler, SequentialLR):  # one after the other, each up to the start of the next
        starts, nexts = [0, *scheduler._milestones], [*scheduler._milestones, math.inf]
        ends = [a + end for a, end, b in zip(starts, ends, nexts, strict=True) if a + end < b - 1]
    return min(ends, default=math.inf)


class TorchSchedulerAdapter:
    """Steps a torch `LRScheduler` once after each applied update; its state is passed through unchanged.

    Its other attributes, such as `get_last_lr` and `last_epoch`, are those of the torch scheduler.

    Args:
        torch_scheduler: the scheduler.

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
        """Step the torch scheduler once, regardless of the number of samples.

        Args:
            increment: samples of the step, over all ranks.
        """
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
        try:
            scheduler.step(*metric)
        except (TypeError, ValueError, ArithmeticError) as error:
            name, last_epoch = type(scheduler).__name__, getattr(scheduler, "last_epoch", "unknown")
            raise ConfigError(
                f"{name}.step() failed at last_epoch {last_epoch} with {named_text(error)}; it "
                f"must give a rate, a number, for every step of the run"
            ) from error
        self._left_at = getattr(scheduler, "last_epoch", None)

    def _note_step(self, increment: int) -> None:
        self.num_steps += increment
        groups = getattr(getattr(self.torch_scheduler, "optimizer", None), "param_groups", [])
        self._rates = [float(group["lr"]) for group in groups]


class MetricSchedulerAdapter(TorchSchedulerAdapter):
    """Steps a scheduler that follows a metric after evaluations (`observe`), and not after updates.

    Args:
        scheduler: a scheduler whose `step` has the metric as its argument, such as `ReduceLROnPlateau`.
    """

    def __init__(self, scheduler: Any) -> None:
        self.torch_scheduler = scheduler
        self.num_steps = 0
        self._rates = []
        self._left_at = getattr(scheduler, "last_epoch", None)
        self._is_told = False

    def step(self, increment: int) -> None:
        """Leave the learning rates as they are.

        Args:
            increment: samples of the step, over all ranks.
        """
        self._note_step(increment)

    def observe(self, metric: float) -> None:
        """Step the scheduler with the metric of an evaluation; the same on all ranks.

        Args:
            metric: the value that the scheduler follows.
        """
        self._step(metric)
