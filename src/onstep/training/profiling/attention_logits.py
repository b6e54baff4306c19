"""Tracks the largest attention logit of a step, for models that record it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from onstep.distributed.pipeline.seats import is_staged
from onstep.events.context import unwrap
from onstep.models.layers.layer import Attention
from onstep.training.compute.losses import owned
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.stages.job import Job
from onstep.training.stages.step_flops import model_options

P = ParamSpec("P")
T = TypeVar("T")


class AttentionLogits(Feature[Job]):
    """Collects the largest attention logit of each micro-batch, and sets the step's value over all ranks."""

    name = "attention_logits"
    when = "model.log_max_attention_logit"
    collective = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether it is configured, or a user's model records one anyway."""
        options = model_options(host.run.cfg, host.model)
        asked = host.run.cfg.model.log_max_attention_logit
        return bool(asked or getattr(options, "log_max_attention_logit", False))

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self._chunks = [unwrap(chunk) for chunk in host.model]
        stages = self._chunks if is_staged(self._chunks) else []
        self._of_stages = [one for chunk in stages for one in chunk.modules() if isinstance(one, Attention)]
        self._logits: list[Tensor] = []

    def after_zero_grad(self) -> None:
        """A step begins, or is computed again."""
        self._logits = []
        for attention in self._of_stages:
            attention.largest_logit = None  # of a step before, where a stage has not run yet

    def wrap_forward(self, forward: Callable[P, T]) -> Callable[P, T]:
        """Read the model's value after the forward pass of each micro-batch."""

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
            result = forward(*args, **kwargs)
            found = [getattr(chunk, "max_attention_logit", None) for chunk in self._chunks]
            self._logits += [owned(logit) for logit in found if logit is not None]
            return result

        return wrapped

    def before_update(self, step: Step) -> None:
        """Reduce the largest value over all ranks; None for a model that records none. Collective."""
        if not self._logits and is_staged(self._chunks):  # without a layer
            self._logits = [torch.full((), -math.inf, device=self.host.run.world.device)]
        if self._logits:
            step.max_attention_logit = self.host.run.world.max(torch.stack(self._logits).max())
