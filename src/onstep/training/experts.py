"""Mixtures of experts and multi-token prediction in the training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor

from onstep.models.multi_token_prediction import MultiTokenPrediction
from onstep.models.router import Router
from onstep.training.expert_steps import ExpertSteps
from onstep.training.feature import Feature, Interruption
from onstep.training.job import Job
from onstep.training.losses import MicroLoss, Weight
from onstep.training.moe_log import interval_losses
from onstep.training.step import Step


class Experts(Feature[Job]):
    """Mixtures of experts and multi-token prediction in the loop: every run of a step counts anew."""

    name = "experts"
    when = "the model has routers or multi-token prediction"
    collective = True
    has_state = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether the model has any; it is searched once for each training."""
        modules = (module for chunk in host.model for module in chunk.modules())
        return any(isinstance(module, (Router, MultiTokenPrediction)) for module in modules)

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._world = host.run.world
        self.steps = ExpertSteps(host.model)

    def after_zero_grad(self) -> None:
        """Begin a step, or the one that did not end anew."""
        self.steps.begin_step()

    def before_micro_batch(self, is_filler: bool) -> None:
        """A filler counts nothing."""
        self.steps.begin_micro_batch(is_filler)

    def before_backward(self, step: Step, micro: MicroLoss, start: Weight | None) -> None:
        """Give the auxiliary losses their scale."""
        self.steps.before_backward(micro, start, len(step.batches.micro_batches) * self._world.size)

    def after_update(self, step: Step) -> None:
        """Add the step up over the ranks. Collective."""
        self.steps.end_step(self._world, updates_biases=step.applied)

    def add_to_read(self, unread: dict[str, dict[str, Tensor]]) -> None:
        """The losses of the interval beside the main one."""
        unread["experts"] = interval_losses(self.steps, self.host.run.cfg)

    def after_read(self) -> None:
        """The next interval begins."""
        self.steps.flush()

    def pause(self, work: Interruption) -> AbstractContextManager[Any]:
        """Micro-batches that are computed again count nothing, and wait for no rank."""
        return replayed(self.steps) if work == "replay" else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """The interval so far."""
        return self.steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the interval of a checkpoint."""
        self.steps.load_state_dict(state_dict)


@contextmanager
def replayed(experts: ExpertSteps) -> Iterator[None]:
    """Micro-batches that run in this block are looked into again: they count nothing, and wait for no rank."""
    experts.step.is_replay = True
    try:
        yield
    finally:
        experts.step.is_replay = False
