"""Integrates mixtures of experts and multi-token prediction into the loop: scales, counts, biases and reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from onstep.distributed.pipeline.seats import is_staged
from onstep.distributed.pipeline.sums import StageSums
from onstep.metrics.moe_losses import prediction_losses, reported_losses, tracked_losses
from onstep.models.layers.router import Router
from onstep.models.layers.routing_record import FIGURES, RoutingStep, count_dtype
from onstep.models.multi_token_prediction import MultiTokenPrediction
from onstep.training.compute.losses import MicroLoss, Scalar
from onstep.training.compute.step import Step
from onstep.training.feature import Feature, Interruption
from onstep.training.protocols import StateDict
from onstep.training.stages.forward_backward import auxiliary_start
from onstep.training.stages.job import Job
from onstep.training.stages.step_flops import model_options


class Experts(Feature[Job]):
    """Handles a model's routers and multi-token prediction in the loop; every run of a step restarts the counts.

    All counts are in one vector on the device. A step's counts are summed over the ranks at the end of the step, by one
    collective; the host does not wait for it.
    """

    name = "experts"
    when = "the model has routers or multi-token prediction"
    collective = True
    has_state = True

    @classmethod
    def wanted(cls, host: Job) -> bool:
        """Whether the model has any; it is searched once per training."""
        modules = (module for chunk in host.model for module in chunk.modules())
        return any(isinstance(module, (Router, MultiTokenPrediction)) for module in modules)

    def __init__(self, host: Job) -> None:
        super().__init__(host)
        self.chunks = host.model
        modules = [module for chunk in self.chunks for module in chunk.modules()]
        self.routers = [one for one in modules if isinstance(one, Router)]
        self.predictions = [one for one in modules if isinstance(one, MultiTokenPrediction)]
        own = [(router.layer_index, router.num_experts) for router in self.routers]
        self._layers, self._places, self._num_depths = (
            own,
            [*range(len(own))],
            sum(len(one.depths) for one in self.predictions),
        )
        self._stages: StageSums | None = None
        if is_staged(self.chunks):
            everywhere = host.run.world.gather((own, self._num_depths))
            self._layers = sorted({layer for layers, _ in everywhere for layer in layers})
            self._places = [self._layers.index(layer) for layer in own]
            self._num_depths = max(depths for _, depths in everywhere)
            self._stages = StageSums(host.run.world.group("pp"))
        self._routing = RoutingStep()
        self._routing.group = host.run.world.data.group(with_parts=True)
        for router in self.routers:
            router.step = self._routing
        for prediction in self.predictions:
            prediction.step = self._routing
        self.last: Tensor | None = None
        """The counts of the last completed step, over all ranks; None before the first."""
        self.interval: Tensor | None = None
        """The counts since the last logged step, over all ranks; for multi-token prediction, the sums of the steps'
        means and their number."""
        self._counts: Tensor | None = None
        self._before: Tensor | None = None
        self._is_open = False

    def after_zero_grad(self) -> None:
        """Begin a step, or restart an unfinished one: its counts are reset."""
        counts, before = self._vectors()
        if self._is_open:
            counts.copy_(before)
        else:
            before.copy_(counts)
        self._is_open = True
        for router in self.routers:
            router.begin_step()

    def before_micro_batch(self, is_filler: bool) -> None:
        """Stop counting for a filler."""
        self._routing.counts = not is_filler

    def before_backward(self, step: Step, micro: MicroLoss, start: Scalar | None) -> None:
        """Set the scale of the auxiliary losses: see `auxiliary_start`."""
        num_starts = len(step.batches.micro_batches) * self.host.run.world.data.size
        self._routing.loss_scale = auxiliary_start(micro, start, num_starts)

    def after_update(self, step: Step) -> None:
        """Sum the step over the ranks, and update the expert biases if the weights were updated. Collective."""
        counts, before = self._vectors()
        last = self.host.run.world.data.sum_losses(counts - before)
        self.last = last if self._stages is None else self._stages(last)
        self._add_to_interval(self.last)
        self._is_open = False
        self._routing.counts, self._routing.loss_scale = True, 1.0
        rows = self.rows(self.last)
        for router, place in zip(self.routers, self._places, strict=True) if step.applied else ():
            router.update_expert_bias(rows[place][: router.num_experts])

    def add_to_read(self, unread: dict[str, dict[str, Tensor]]) -> None:
        """Add the interval's losses other than the main one."""
        unread["experts"] = {} if self.interval is None else self.losses(self.interval)

    def after_read(self) -> None:
        """Begin the next interval."""
        self.flush()

    @contextmanager
    def pause(self, work: Interruption) -> Iterator[None]:
        """Recomputed micro-batches count nothing, and wait for no rank."""
        before = self._routing.is_replay
        self._routing.is_replay = before or work == "replay"
        try:
            yield
        finally:
            self._routing.is_replay = before

    def flush(self) -> Tensor | None:
        """The counts since the last flush, over all ranks; None without a step."""
        interval, self.interval = self.interval, None
        return interval

    def rows(self, vector: Tensor) -> list[Tensor]:
        """The slices of the routers of all layers of a vector: loads, then `FIGURES`."""
        sizes = [num_experts + len(FIGURES) for _, num_experts in self._layers]
        return list(torch.split(vector[: sum(sizes)], sizes)) if sizes else []

    def prediction_sums(self, vector: Tensor) -> Tensor:
        """The slice of multi-token prediction: (depths, 2), sum of losses and number of labels."""
        return vector[vector.numel() - 2 * self._num_depths :].view(-1, 2)

    def losses(self, counts: Tensor) -> dict[str, Tensor]:
        """The losses in the `counts` of a step or an interval, by the names they are reported under; not yet read."""
        model = model_options(self.host.run.cfg, self.chunks)
        layers = {}
        for (index, num_experts), row in zip(self._layers, self.rows(counts), strict=True):
            layers[index] = dict(zip(FIGURES, row[num_experts:].unbind(), strict=True))
        losses = reported_losses(layers, tracked_losses(model), per_layer=model.moe_per_layer_logging)
        return losses | (prediction_losses(self.prediction_sums(counts)) if self._num_depths else {})

    def state_dict(self) -> StateDict:
        """The interval so far."""
        return {"interval": self.interval}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the interval of a checkpoint."""
        interval = state_dict["interval"]
        self.interval = None if interval is None else interval.to(self._vectors()[0].device).clone()

    def _add_to_interval(self, counts: Tensor) -> None:
        """Add a step; for multi-token prediction every step has the same weight, as for the main loss."""
        counts = counts.clone()
        sums = self.prediction_sums(counts)
        sums[:, 0] /= sums[:, 1].clamp(min=1)
        sums[:, 1] = 1
        self.interval = counts if self.interval is None else self.interval.add_(counts)

    def _vectors(self) -> tuple[Tensor, Tensor]:
        """The vector of counts and its copy from the start of the step; the routers count into the first."""
        if self._counts is None or self._before is None:
            device = next(self.chunks[0].parameters()).device
            num_values = sum(num_experts + len(FIGURES) for _, num_experts in self._layers) + 2 * self._num_depths
            self._counts = torch.zeros(num_values, dtype=count_dtype(device), device=device)
            self._before = torch.zeros_like(self._counts)
            rows, depths = self.rows(self._counts), self.prediction_sums(self._counts)
            for router, place in zip(self.routers, self._places, strict=True):
                router.record.row = rows[place]
            for prediction in self.predictions:
                prediction.record, depths = depths[: len(prediction.depths)], depths[len(prediction.depths) :]
        return self._counts, self._before
