"""Computes the loss and the gradient of each sample of a step, and its share of the step's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint import RngState
from onstep.data import Batch, StepBatches
from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed import no_sync
from onstep.distributed.buffered import buffered_chunks
from onstep.distributed.shards import as_dtensor, updated_shard, whole
from onstep.events.context import unwrap
from onstep.models import Transformer
from onstep.training.compute.loss_sums import is_known, local_sums
from onstep.training.compute.losses import IGNORE_INDEX, MicroLoss
from onstep.training.compute.rows import normalised_alone, rows_of
from onstep.training.compute.step import MicroBatches, Step
from onstep.training.protocols import StateDict
from onstep.training.stages.forward_backward import forward_of
from onstep.training.stages.forward_step import forward_step
from onstep.training.stages.job import Job

_TOKENS = ("tokens", "input_ids")


@dataclass
class DocumentLoss:
    """A document within a packed sequence."""

    first: int
    """Its first position."""
    length: int
    loss: float
    """Mean over its labels; 0 without any."""
    share: float
    """Of the step's loss."""
    place: str | None = None


@dataclass
class Sample:
    """A sample of a step."""

    rank: int
    micro_batch: int
    row: int
    """Within its micro-batch; -1 for a micro-batch that cannot be divided into samples."""
    index: int | None
    """In its dataset; None for a sample without an index."""
    loss: float
    """Its mean loss."""
    share: float
    """Of the step's loss."""
    grad_norm: float | None
    """Norm of what it adds to the step's gradient, before clipping; None with weights in shards, as FSDP2 has them."""
    grad_share: float | None
    """Share of the step's gradient that it gives, in that gradient's direction: all together are 1."""
    num_labels: int | None
    epoch: int = 0
    place: str | None = None
    text: str | None = None
    unusual: list[str] = field(default_factory=list)
    documents: list[DocumentLoss] = field(default_factory=list)
    fields: dict[str, str] = field(default_factory=dict)
    """What its fields hold, where it is not text."""


class SampleLosses:
    """Measures the samples of a held step, one at a time: beside the training, one further gradient is in memory.

    Each is computed with the random state of the step's beginning, so dropout masks are not those of the step.
    Batch norms use their running statistics.
    """

    def __init__(self, job: Job, step: Step, random_state: StateDict) -> None:
        self._job, self._step, self._random_state = job, step, random_state
        self._model = unwrap(job.model[0])
        trained = [one for one in job.model[0].parameters() if one.requires_grad and as_dtensor(one) is None]
        grads = {one: updated_shard(one).grad for one in trained}
        self._step_grads = {one: whole(grad) for one, grad in grads.items() if grad is not None}
        """By parameter; none for weights in shards, of which a single sample has no gradient."""
        self._parameters = list(self._step_grads)
        self._runs_backward = bool(getattr(job.forward_step_func, "runs_backward", False))
        self._weight, self._total = step.total.weight, float(step.total.numerator)
        if step.micros[0].kind == "mean" and is_known(self._weight, 1):  # a single mean is not weighted
            self._weight = step.micros[0].weight
            self._total *= float(self._weight)
        self._items: dict[str, Any] = {}
        """What the forward step keeps for the micro-batches of the step, such as the number of its labels."""
        self._scale = float(job.scaler.scale) if job.scaler is not None else 1.0
        is_ours = job.raw_forward_step_func is forward_step and isinstance(self._model, Transformer)
        self._gives_tokens = is_ours
        of_step = list(self._step_grads.values())
        self._norm = float(torch.stack(torch._foreach_norm(of_step)).norm()) if of_step else 0.0
        """Of the gradients as they are, after clipping."""
        self._true_norm = self._norm if step.grad_norm is None else float(step.grad_norm)

    def measure(self, *, with_gradients: bool = True) -> list[Sample]:
        """The samples of this rank, in their order. Collective."""
        found = []
        with undisturbed(self._job), no_sync(self._job.model), normalised_alone(self._job.model):
            if self._step.micros[0].kind == "share":
                self._items = self._items_of_step()
            for number, batch in enumerate(self._step.micro_batches):
                if self._step.batches.is_filler[number]:
                    continue
                ids = self._step.sample_ids
                for row, part in enumerate(rows_of(batch)):
                    index = None if ids is None or row >= len(ids[number]) else ids[number][row]
                    is_whole = part is batch and (count_samples(batch) or 0) != 1
                    found.append(self._measured(part, number, -1 if is_whole else row, index, with_gradients))
        return found

    def _measured(self, part: Batch, number: int, row: int, index: int | None, with_gradients: bool) -> Sample:
        norm = grad_share = None
        RngState(self._job.run.world.device).load_state_dict(self._random_state)
        if self._runs_backward:
            with self._gradients_aside():
                micro, losses = self._forward(part)
                own_grads = [one.grad for one in self._parameters]
            if with_gradients and own_grads:
                norm, grad_share = self._compared(own_grads, self._scale * self._job.run.world.data.size)
        else:
            with torch.set_grad_enabled(with_gradients):
                micro, losses = self._forward(part)
            if with_gradients and micro.loss.requires_grad and self._parameters:
                norm, grad_share = self._gradient(micro)
        numerator, weight, labels = local_sums([micro])
        whole = float(numerator)
        own = whole / max(float(weight), 1.0)
        if micro.kind == "share":
            of_step, factor = self._step.total.tokens, 1.0
            portion = float(labels) / float(of_step) if labels and of_step else 0.0
            if (found := self._portion_of(part)) is not None:
                portion, factor = found
                norm = None if norm is None else norm * factor
                grad_share = None if grad_share is None else grad_share * factor
            whole *= factor
            own = whole / portion if portion else whole
        sample = Sample(
            rank=self._job.run.world.rank,
            micro_batch=number,
            row=row,
            index=index,
            loss=own,
            share=whole / self._total if self._total else 0.0,
            grad_norm=norm,
            grad_share=grad_share,
            num_labels=None if labels is None else int(labels),
            epoch=self._job.run.train_state.epoch,
        )
        if losses is not None:
            sample.documents = self._documents(part, losses)
        return sample

    def _forward(self, part: Batch) -> tuple[MicroLoss, Tensor | None]:
        """The loss of a batch of one sample and, where the model gives them, those of its tokens."""
        job, step = self._job, StepBatches([part], None, None, [False])
        batches = MicroBatches(step, job.run.world.device)
        batches.items.update(self._items)
        batch = batches.stage(0)
        if not self._gives_tokens:
            return forward_of(job)(batches, batch, False), None
        packed = {key: batch[key] for key in ("position_ids", "document_ids") if key in batch}
        with job.run.autocast():
            losses = self._model(batch["tokens"], batch["labels"], reduction="none", **packed)
        num_labels = batch["labels"].ne(IGNORE_INDEX).sum()
        return MicroLoss(losses.sum(), num_labels, "sum", {}, num_labels), losses.detach()

    def _gradient(self, micro: MicroLoss) -> tuple[float, float]:
        """Norm of what a sample adds to the step's gradient, and its share of that."""
        weight = micro.weight if micro.kind == "mean" else 1.0
        total = 1.0 if micro.kind == "share" else max(float(self._weight), 1.0)
        start = torch.full_like(micro.loss, float(weight) / total * self._scale)
        grads = torch.autograd.grad(micro.loss, self._parameters, start, allow_unused=True)
        return self._compared(grads, self._scale)

    def _compared(self, own: Sequence[Tensor | None], scale: float) -> tuple[float, float]:
        """The norm of a sample's gradients, which are `scale` times what it adds, and their share of the step's."""
        of_step = self._step_grads.values()
        pairs = [(one, grad) for one, grad in zip(own, of_step, strict=True) if one is not None]
        if not pairs:
            return 0.0, 0.0
        norm = torch.stack(torch._foreach_norm([one for one, _ in pairs])).float().norm() / scale
        dots = [torch.dot(one.flatten().float(), grad.flatten().float()) for one, grad in pairs]
        along = torch.stack(dots).sum() / scale
        product = self._norm * self._true_norm
        return float(norm), float(along) / product if product else 0.0

    def _portion_of(self, part: Batch) -> tuple[float, float] | None:
        """What a sample counts in the step, where only the forward step knows it, and the factor for its loss."""
        portion_of = getattr(self._job.raw_forward_step_func, "portion_of", None)
        found: tuple[float, float] | None = None if portion_of is None else portion_of(part, self._step.micro_batches)
        return found

    def _items_of_step(self) -> dict[str, Any]:
        """What the forward step counts over the whole step when it begins. Collective."""
        whole = MicroBatches(self._step.batches, self._job.run.world.device)
        batch = whole.stage(0)
        with self._gradients_aside() if self._runs_backward else torch.no_grad():
            forward_of(self._job)(whole, batch, self._step.batches.is_filler[0])
        return whole.items

    @contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Let a forward step that runs backward add to no gradients but its own."""
        kept = [one.grad for one in self._parameters]
        for one in self._parameters:
            one.grad = None
        for chunk in buffered_chunks(self._job.model):  # which add to what they hold, after its sum is elsewhere
            for member in chunk.members:
                member.gradient.zero_()
        try:
            yield
        finally:
            for one, grad in zip(self._parameters, kept, strict=True):
                one.grad = grad

    def _documents(self, part: Batch, losses: Tensor) -> list[DocumentLoss]:
        """The documents of a sequence, with their losses; none for a sequence of one."""
        labels, ids = part["labels"][0].cpu().numpy(), part.get("document_ids")
        tokens, own = part["tokens"][0].cpu().numpy(), losses[0].float().cpu().numpy()
        if ids is not None:
            begins = np.flatnonzero(np.diff(ids[0].cpu().numpy(), prepend=-1))
        else:
            end_id = getattr(getattr(self._job.run, "tokenizer", None), "eos_id", None)
            begins = np.flatnonzero(np.r_[True, tokens[:-1] == end_id])
        ends = [*begins[1:], len(tokens)]
        if len(begins) < 2:
            return []
        found = []
        for first, end in zip(begins, ends, strict=True):
            count, total = int((labels[first:end] != IGNORE_INDEX).sum()), float(own[first:end].sum())
            share = total / self._total if self._total else 0.0
            found.append(DocumentLoss(int(first), int(end - first), total / max(count, 1), share))
        return found


@contextmanager
def undisturbed(job: Job) -> Iterator[None]:
    """Restore random generators and buffers on exit, and let features ignore what is computed.

    The forward passes see copies of the buffers, so the graph of a loss stays valid when the buffers are back.
    """
    modules = [module for chunk in job.model for module in chunk.modules()]
    buffers = [(module, dict(module._buffers)) for module in modules if module._buffers]
    copies = {id(one): one.clone() for _, named in buffers for one in named.values() if one is not None}
    for module, named in buffers:
        module._buffers.update({name: None if one is None else copies[id(one)] for name, one in named.items()})
    try:
        with RngState(job.run.world.device).kept(), job.run.features.pause("replay"):
            yield
    finally:
        for module, named in buffers:
            module._buffers.clear()
            module._buffers.update(named)


def tokens_of(batch: Batch) -> np.ndarray[Any, Any] | None:
    """The token ids (batch, seq) of a batch; None for other data."""
    found = next((batch[key] for key in _TOKENS if key in batch), None) if isinstance(batch, Mapping) else None
    is_ids = isinstance(found, Tensor) and not found.is_floating_point() and found.ndim == 2
    return found.cpu().numpy() if is_ids and isinstance(found, Tensor) else None
