"""Tracks the largest attention logit of a step, for models that record it."""

from __future__ import annotations

import torch
from torch import Tensor

from onstep.events.context import unwrap
from onstep.training.compute.losses import MicroLoss, Scalar, owned
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.job import Job
from onstep.training.stages.step_flops import model_options


class AttentionLogits(Feature[Job]):
    """Collects the largest attention logit of each micro-batch, and sets the step's value over all ranks."""

    name = "attention_logits"
    when = "model.log_max_attention_logit"
    collective = True
    needs_of_engine = ("loss",)

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether it is configured, or a user's model records one anyway."""
        options = model_options(host.run.cfg, host.model)
        asked = host.run.cfg.model.log_max_attention_logit
        return bool(asked or getattr(options, "log_max_attention_logit", False))

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._model = unwrap(host.model[0])
        self._logits: list[Tensor] = []

    def after_zero_grad(self) -> None:
        """A step begins, or is computed again."""
        self._logits = []

    def before_backward(self, step: Step, micro: MicroLoss, start: Scalar | None) -> None:
        """Read the model's value after the forward pass of each micro-batch."""
        logit = getattr(self._model, "max_attention_logit", None)
        if logit is not None:
            self._logits.append(owned(logit))

    def before_update(self, step: Step) -> None:
        """Reduce the largest value over all ranks; None for a model that records none. Collective."""
        if self._logits:
            step.max_attention_logit = self.host.run.world.max(torch.stack(self._logits).max())
