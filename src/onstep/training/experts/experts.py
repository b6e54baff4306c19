"""Mixtures of experts and multi-token prediction in the training loop: scales, counts, biases, reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onstep.metrics.moe_losses import prediction_losses, reported_losses, tracked_losses
from onstep.models.layers.router import Router
from onstep.models.layers.routing_record import FIGURES, RoutingStep, count_dtype
from onstep.models.multi_token_prediction import MultiTokenPrediction
from onstep.training.compute.losses import MicroLoss, Weight
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.protocols import StateDict
from onstep.training.stages.job import Job
from onstep.training.stages.step_flops import model_options


class Experts(Feature[Job]):
    """The routers of a model, and its multi-token prediction, in the loop: every run of a step counts anew.

    All that they count lies in one vector on the device. A step's part of it is added up over the ranks at the step's
    end, by one collective; the host does not wait for it.
    """

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
        self.chunks = host.model
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        self.routers = [one for one in modules if isinstance(one, Router)]
        self.predictions = [one for one in modules if isinstance(one, MultiTokenPrediction)]
        self._routing = RoutingStep()
        for router in self.routers:
            router.step = self._routing
        for prediction in self.predictions:
            prediction.step = self._routing
        self.last: Tensor | None = None
        """The counts of the step that ended last, over all ranks; None before the first."""
        self.interval: Tensor | None = None
        """The counts since the last logged step, over all ranks; of multi-token prediction sums of the steps' means,
        and their number."""
        self._counts: Tensor | None = None
        self._before: Tensor | None = None
        self._is_open = False

    def after_zero_grad(self) -> None:
        """Begin a step, or the one that did not end anew: what it has counted is forgotten."""
        counts, before = self._vectors()
        if self._is_open:
            counts.copy_(before)
        else:
            before.copy_(counts)
        self._is_open = True
        for router in self.routers:
            router.begin_step()

    def before_micro_batch(self, is_filler: bool) -> None:
        """A filler counts nothing."""
        self._routing.counts = not is_filler

    def before_backward(self, step: Step, micro: MicroLoss, start: Weight | None) -> None:
        """Give the auxiliary losses their scale: see `auxiliary_start`."""
        num_starts = len(step.batches.micro_batches) * self.host.run.world.size
        self._routing.loss_scale = auxiliary_start(micro, start, num_starts)

    def after_update(self, step: Step) -> None:
        """Add the step up over the ranks, and move the expert biases where weights were updated too. Collective."""
        counts, before = self._vectors()
        self.last = self.host.run.world.sum(counts - before)
        self._add_to_interval(self.last)
        self._is_open = False
        self._routing.counts, self._routing.loss_scale = True, 1.0
        for router, row in zip(self.routers, self.rows(self.last), strict=True) if step.applied else ():
            router.update_expert_bias(row[: router.num_experts])

    def add_to_read(self, unread: dict[str, dict[str, Tensor]]) -> None:
        """The losses of the interval beside the main one."""
        unread["experts"] = {} if self.interval is None else self.losses(self.interval)

    def after_read(self) -> None:
        """The next interval begins."""
        self.flush()

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        """Micro-batches that are computed again count nothing, and wait for no rank."""
        before = self._routing.is_replay
        self._routing.is_replay = before or work == "replay"
        try:
            yield
        finally:
            self._routing.is_replay = before

    def flush(self) -> Tensor | None:
        """The counts since the last flush, over all ranks; None where there was no step."""
        interval, self.interval = self.interval, None
        return interval

    def rows(self, vector: Tensor) -> list[Tensor]:
        """The routers' parts of a vector: loads, then `FIGURES`."""
        sizes = [router.num_experts + len(FIGURES) for router in self.routers]
        return list(torch.split(vector[: sum(sizes)], sizes)) if sizes else []

    def prediction_sums(self, vector: Tensor) -> Tensor:
        """The part of multi-token prediction: (depths, 2), sum of losses and number of labels."""
        num_values = sum(2 * len(one.depths) for one in self.predictions)
        return vector[vector.numel() - num_values :].view(-1, 2)

    def losses(self, counts: Tensor) -> dict[str, Tensor]:
        """The losses in the `counts` of a step or an interval, by the names that they are reported by; unread."""
        model = model_options(self.host.run.cfg, self.chunks)
        layers = {}
        for router, row in zip(self.routers, self.rows(counts), strict=True):
            layers[router.layer_index] = dict(zip(FIGURES, row[router.num_experts :].unbind(), strict=True))
        losses = reported_losses(layers, tracked_losses(model), per_layer=model.moe_per_layer_logging)
        return losses | (prediction_losses(self.prediction_sums(counts)) if self.predictions else {})

    def state_dict(self) -> StateDict:
        """The interval so far."""
        return {"interval": self.interval}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the interval of a checkpoint."""
        interval = state_dict["interval"]
        self.interval = None if interval is None else interval.to(self._vectors()[0].device).clone()

    def _add_to_interval(self, counts: Tensor) -> None:
        """Of multi-token prediction each step counts the same, as of the main loss."""
        counts = counts.clone()
        sums = self.prediction_sums(counts)
        sums[:, 0] /= sums[:, 1].clamp(min=1)
        sums[:, 1] = 1
        self.interval = counts if self.interval is None else self.interval.add_(counts)

    def _vectors(self) -> tuple[Tensor, Tensor]:
        """What is counted, and what was when the step began; the routers count into the first."""
        if self._counts is None or self._before is None:
            device = next(self.chunks[0].parameters()).device
            sizes = [one.num_experts + len(FIGURES) for one in self.routers]
            sizes += [2 * len(one.depths) for one in self.predictions]
            self._counts = torch.zeros(sum(sizes), dtype=count_dtype(device), device=device)
            self._before = torch.zeros_like(self._counts)
            parts = list(torch.split(self._counts, sizes))
            for router, row in zip(self.routers, parts, strict=False):
                router.record.row = row
            for prediction, row in zip(self.predictions, parts[len(self.routers) :], strict=True):
                prediction.record = row.view(-1, 2)
        return self._counts, self._before


def auxiliary_start(micro: MicroLoss, start: Weight | None, num_starts: int) -> Weight:
    """What the backward pass of a micro-batch's auxiliary losses starts from.

    With it, the gradient of a step is that of

        main loss + coefficient * mean over micro-batches and ranks of the auxiliary loss,

    where each micro-batch weighs as much as in the main loss: by its labels, or as `train.loss_weighting` says. Of
    shares (`LossShare`), whose whole is not known here, all weigh the same.

    Args:
        start: what the main loss starts from (`backward_start_of`), with the loss scale in it; None is 1.
        num_starts: micro-batches of the step on one rank, times the ranks.
    """
    start = 1.0 if start is None else start
    if micro.kind == "share":
        return start / num_starts
    return start * micro.weight if micro.kind == "sum" else start
