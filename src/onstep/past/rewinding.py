"""Defines `Past`: a repeated run that is held at a step, as its caller sees it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from onstep.checkpoint import RngState
from onstep.data import Batch
from onstep.distributed import no_sync
from onstep.errors import ConfigError
from onstep.events.context import unwrap
from onstep.past.comparison import Comparison
from onstep.past.layers import Means, Weights, gradients_of, norms_by_layer
from onstep.past.metrics import Log
from onstep.past.observer import END, UPDATE, UPDATED, Watch
from onstep.past.place import Plan
from onstep.past.sample_texts import fields_of_item, text_of
from onstep.past.samples import Sample, SampleLosses, undisturbed
from onstep.past.sources import Sources
from onstep.past.unusual import Seen, mark, mark_measures
from onstep.training.compute.loss_sums import at_least_one
from onstep.training.compute.rows import batch_norms, rows_of
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.protocols import StateDict
from onstep.training.runs.decisions import DecisionLog
from onstep.training.stages.forward_backward import BufferGuard, forward_of
from onstep.training.stages.job import Job


class Past:
    """A repeated run, held at a step: its gradients are ready, and its weights are those that computed them.

    The gradients are as the optimizer receives them: unscaled, and clipped if the run clips. What the caller computes
    with the model does not change the run as long as weights and `gradients` stay as they are; `forward` also leaves
    the random generators alone.

    Args:
        plan: how the steps are repeated.
        comparison: the repeated values beside those of the record.
    """

    def __init__(self, plan: Plan, watch: Watch, comparison: Comparison, log: Log | None = None) -> None:
        self.plan = plan
        self.comparison = comparison
        """What the repeated steps have logged, beside the record."""
        self.warnings: list[str] = []
        """What the repeated run warned of."""
        self.seen = Seen()
        self.means = Means(10)
        """Norms of the layers in the last steps before the one that is held."""
        self._watch = watch
        self._weights: Weights | None = None
        self.log = log
        """Metrics of each repeated step, up to the one that is held; None unless asked for."""
        self.dataset: Any = None
        """What a Trainer trains on, whose samples have more to show than what is collated."""
        watch.tell = self._hear

    @property
    def job(self) -> Job:
        """The objects of the training: the run, its optimizer, its schedule."""
        return self._watch.job

    @property
    def current(self) -> Step:
        """The step that is held: its micro-batches, their losses, its gradient norm."""
        return self._watch.step

    @property
    def step(self) -> int:
        """The number of the step that is held."""
        return self.current.number

    @property
    def model(self) -> nn.Module:
        """The model, as the forward step is called with it."""
        return self.job.model[0]

    @property
    def batches(self) -> list[Batch]:
        """The step's micro-batches on this rank."""
        return self.current.micro_batches

    @property
    def batch(self) -> Batch:
        """The step's micro-batch.

        Raises:
            ConfigError: if the step has several; `batches` has them all.
        """
        if len(self.batches) != 1:
            raise ConfigError(f"step {self.step} has {len(self.batches)} micro-batches; use past.batches.")
        return self.batches[0]

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name of their parameter, as the optimizer receives them: in shards, if it updates shards."""
        return gradients_of(unwrap(self.model).named_parameters())

    @property
    def seconds(self) -> float:
        """The time from the first repeated step to the place that is held, without loading and looking."""
        return self._watch.seconds

    @property
    def loss(self) -> float:
        """The step's loss over all micro-batches and ranks."""
        return float(self.current.total.value())

    @property
    def grad_norm(self) -> float | None:
        """The norm of the step's gradients before clipping; None if float16 overflowed."""
        norm = self.current.grad_norm
        return None if norm is None else float(norm)

    @property
    def random_state(self) -> StateDict:
        """The random generators right before the step's first forward pass."""
        return self._watch.random_state

    @property
    def branch(self) -> int:
        """The number of rollbacks that the run has done before the step."""
        return self.job.run.features.room(DecisionLog).branch

    def take_buffers(self) -> BufferGuard:
        """The model's buffers right before the step's first forward pass, which later steps do not replace."""
        buffers, self._watch.buffers = self._watch.buffers, None
        assert buffers is not None
        return buffers

    def release(self) -> None:
        """Hold at no further step: the caller trains on with the objects of the job."""
        self._watch.wanted, self._watch.tell = sys.maxsize, lambda place, step: None

    def forward(self) -> Tensor:
        """The step's mean loss on this rank, 0-d, computed again with the random state of its first forward pass.

        With the weights of the held step it equals the loss that the step had; a graph is built unless gradients are
        off. Random generators and buffers are as before.
        """
        job, micros = self.job, []
        iterator = MicroBatches(self.current.batches, job.run.world.device)
        with undisturbed(job), no_sync(job.model):
            RngState(job.run.world.device).load_state_dict(self._watch.random_state)
            forward = forward_of(job)
            for number in range(len(iterator)):
                batch = iterator.stage(number)
                micros.append(forward(iterator, batch, self.current.batches.is_filler[number]))
        sums = [one.loss * one.weight if one.kind == "mean" else one.loss for one in micros]
        weight = sum((one.weight for one in micros[1:]), micros[0].weight)
        return sum(sums[1:], sums[0]) / (1 if micros[0].kind == "share" else at_least_one(weight))

    def samples(self, *, with_gradients: bool = True) -> list[Sample]:
        """The samples of the step, those of all ranks, each with its loss and the norm of its gradient. Collective.

        Needs the memory of one gradient beside that of the training, of two where ranks divide the updates.

        Args:
            with_gradients: whether the norm of each sample's gradient is computed, which requires a backward pass
                for each.
        """
        job = self.job
        batches = [
            row
            for number, batch in enumerate(self.batches)
            if not self.current.batches.is_filler[number]
            for row in rows_of(batch)
        ]
        found = SampleLosses(job, self.current, self._watch.random_state).measure(with_gradients=with_gradients)
        if batch_norms(job.model):
            self.warnings.append("batch norms used their running statistics for each sample, not those of its batch")
        tokenizer = getattr(job.run, "tokenizer", None)
        dataset = getattr(job.reader, "dataset", None)
        if tokenizer is not None and dataset is not None and not self.plan.is_of_trainer:
            known = [one for one in found if one.index is not None]
            counts = [max(len(one.documents), 1) for one in known]
            sources = Sources(job.run.cfg.dataset, dataset, tokenizer)
            for sample, places in zip(known, sources.places([one.index or 0 for one in known], counts), strict=True):
                sample.place = next(iter(places), None)
                for document, place in zip(sample.documents, places, strict=False):
                    document.place = place
        for sample, batch in zip(found, batches, strict=True):
            sample.text = text_of(batch, tokenizer)
        mark(found, batches, self.seen.with_step(self.current, job.run.world), self.step)
        with undisturbed(job):
            for sample in found:
                sample.fields |= fields_of_item(self.dataset, sample.index)
        samples = [sample for rank in job.run.world.data.gather(found) for sample in rank]
        mark_measures(samples)
        return samples

    def next(self) -> Past:
        """Apply the update and continue to the same place of the next step.

        Raises:
            ConfigError: if the run ends before.
        """
        self._let_go_on(f"there is no step after {self.step}: the run ended there.")
        return self

    def finish_step(self) -> Past:
        """Apply the update and stay at the end of this step; `model` then has the weights after it."""
        if self._watch.turns.place == UPDATE:
            self._watch.holds_at_end = True
            self._let_go_on(f"step {self.step} ended the run.")
        return self

    @property
    def is_finished(self) -> bool:
        """Whether the update of the step has been applied."""
        return self._watch.turns.place == END

    def _hear(self, place: str, step: Step) -> None:
        """Note what is measured of each repeated step, and the norms of the last ones before the wanted step."""
        is_near = self._watch.wanted - self.means.most <= step.number < self._watch.wanted
        if place == UPDATE and self.log is not None:
            self.log.add(self.job, step)
        if place == UPDATE and is_near:
            self._weights = Weights(self.model)
            self.means.gradients.append(norms_by_layer(self.gradients.items()))
        elif place == UPDATED:
            self.seen.add(step)
            if self._weights is not None:
                self.means.updates.append(self._weights.update_norms())
                self._weights = None

    def _let_go_on(self, otherwise: str) -> None:
        if not self._watch.turns.is_held:
            raise ConfigError("the rewind is closed; use past inside its `with` block.")
        self._watch.turns.go_on()
        if not self._watch.turns.is_held:
            raise ConfigError(otherwise)
