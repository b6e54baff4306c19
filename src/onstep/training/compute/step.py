"""Holds one optimizer step: its input, its micro-batches on the device, and its results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onstep.data import Batch, StepBatches
from onstep.data.loaders.collate import mapping_like
from onstep.errors import DataError
from onstep.processes.heartbeat import HEARTBEAT
from onstep.training.compute.loss_sums import StepLoss, at_least_one, local_sums
from onstep.training.compute.losses import MicroLoss, Scalar, as_scalar

_CPU = torch.device("cpu")


class MicroBatches(Iterator[Batch]):
    """A step's micro-batches as the forward step sees them; each is moved to the device right before its use."""

    __slots__ = ("_next", "_staged", "_staged_index", "batches", "device", "items")

    def __init__(self, batches: StepBatches, device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self.items: dict[str, Any] = {}
        """Storage for a forward step, kept from one micro-batch of the step to the next."""
        self._next = 0
        self._staged_index = -1
        self._staged: Batch = None

    def __len__(self) -> int:
        return len(self.batches.micro_batches)

    def is_filler(self) -> bool:
        """Whether the last micro-batch must count as zero."""
        return self.batches.is_filler[self._next - 1]

    @property
    def num_samples(self) -> int | None:
        """Samples of the last micro-batch; None if unknown."""
        samples = self.batches.local_samples
        return None if samples is None else samples[self._next - 1]

    @property
    def on_host(self) -> Batch:
        """The last micro-batch as it is on the host."""
        return self.batches.micro_batches[self._next - 1]

    @property
    def staged(self) -> Batch:
        """The micro-batch that was moved to the device last."""
        return self._staged

    @property
    def is_read(self) -> bool:
        """Whether the micro-batch that was moved to the device last has been read, and none after it."""
        return self._next == self._staged_index + 1

    def stage(self, index: int) -> Batch:
        """Move micro-batch `index` to the device; the next `next()` returns it."""
        HEARTBEAT.beats += 1
        try:
            batch = to_device(self.batches.micro_batches[index], self.device)
        except NotImplementedError as error:  # torch: Cannot copy out of meta tensor
            raise DataError(
                f"a micro-batch cannot be moved to {self.device}: {error} Tensors on the device 'meta' have no values; "
                f"make the samples without it (torch.device('meta'), torch.set_default_device)"
            ) from error
        self._staged, self._staged_index, self._next = batch, index, index
        return batch

    def __next__(self) -> Batch:
        index = self._next
        if index != self._staged_index:  # a forward step reads beyond its own micro-batch
            if index >= len(self.batches.micro_batches):
                raise StopIteration
            self.stage(index)
        self._next = index + 1
        return self._staged


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with every tensor on `device`, copied without waiting if memory is pinned.

    Tensors inside mappings, lists and tuples are found; everything else is unchanged.
    """
    if type(batch) is dict and device == _CPU:
        for value in batch.values():
            if getattr(value, "device", _CPU) != _CPU:
                break
        else:
            return batch
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


@dataclass(eq=False)
class Step:
    """One optimizer step. Losses and norms are 0-d device tensors; nothing here is read by the loop."""

    number: int
    """Starts at 1 for the first step of a run."""
    batches: StepBatches
    micros: list[MicroLoss] = field(default_factory=list)
    """The losses of its micro-batches on this rank; none where its part of the model ends in no loss."""
    total: StepLoss = field(init=False)
    """The loss over all micro-batches and ranks, once forward and backward passes are done."""
    factor: Scalar | None = None
    """The factor for the gradients; None means 1."""
    grad_norm: Scalar | None = None
    """Global L2 norm before clipping; None if it was not computed, or overflowed in float16."""
    num_zeros: Tensor | int | None = None
    """Number of exact zeros in the gradients, if counted."""
    applied: bool = False
    """Whether the update was applied, as far as the host knows."""
    left_out: bool = False
    """Whether an anomaly prevented the update; the step then has its own record."""
    max_attention_logit: Tensor | None = None
    """Largest attention logit over all ranks, if the model records it."""

    @property
    def skipped_iter(self) -> bool:
        """Whether the update was not applied."""
        return not self.applied

    @property
    def micro_batches(self) -> list[Batch]:
        """The micro-batches of this rank, on the host."""
        return self.batches.micro_batches

    @property
    def sample_ids(self) -> list[list[int]] | None:
        """Dataset indices of this rank's samples, one list per micro-batch."""
        return self.batches.sample_ids

    @cached_property
    def loss_dict(self) -> dict[str, Tensor]:
        """The reduced losses by name: those that the forward step reported, else the loss itself as `lm loss`."""
        return self.total.reports or {"lm loss": self.total.value()}

    @cached_property
    def loss(self) -> Tensor:
        """The mean loss of this rank's samples, not reduced over the ranks."""
        own = None if self.micros else self.total.own
        if own is None:
            return mean_loss(self.micros)
        numerator, weight, _ = own
        return numerator if self.total.kind == "share" else numerator / at_least_one(weight)

    @property
    def tokens(self) -> Tensor | None:
        """The number of labels that this rank trained on, as a device tensor; None if unknown."""
        own = None if self.micros else self.total.own
        tokens = (local_sums(self.micros) if own is None else own)[2]
        return None if tokens is None else as_scalar(tokens, torch.int64, self.loss.device)


def mean_loss(micros: list[MicroLoss]) -> Tensor:
    """The mean loss of some micro-batches on this rank, 0-d."""
    numerator, weight, _ = local_sums(micros)
    return numerator if micros[0].kind == "share" else numerator / at_least_one(weight)


@dataclass
class LastStep:
    """The current or most recent step; None before the first."""

    step: Step | None = None
    _loss_before: StepLoss | None = None
    _logit_before: Tensor | None = None

    def begin(self, number: int, batches: StepBatches) -> Step:
        """Begin a new step; of the previous one only its results are kept."""
        self._loss_before, self._logit_before = self.loss, self.max_attention_logit
        self.step = Step(number, batches)
        return self.step

    @property
    def loss(self) -> StepLoss | None:
        """The newest known loss: of the current step, or of the previous one."""
        known: StepLoss | None = getattr(self.step, "total", None)
        return self._loss_before if known is None else known

    @property
    def max_attention_logit(self) -> Tensor | None:
        """Likewise for the largest attention logit."""
        known = None if self.step is None else self.step.max_attention_logit
        return self._logit_before if known is None else known
