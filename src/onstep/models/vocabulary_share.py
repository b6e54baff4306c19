"""Computes logits and losses where each tensor-parallel rank has the rows of some tokens of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onstep.distributed.gathered_inputs import as_whole
from onstep.distributed.tensor_regions import copied, joined

IGNORE_INDEX = -100


@dataclass(frozen=True)
class VocabularyShare:
    """This rank's part of the vocabulary: `ceil(size / ranks)` tokens, the last ranks what is left."""

    size: int
    """The number of tokens."""
    mesh: DeviceMesh
    """The ranks that divide it, of one dimension."""

    @property
    def group(self) -> ProcessGroup:
        """The process group of the ranks."""
        return self.mesh.get_group()

    @property
    def start(self) -> int:
        """The first token of this rank."""
        return -(-self.size // self.group.size()) * self.group.rank()

    def enter(self, hidden: Tensor) -> Tensor:
        """Hidden states for this rank's logits; gradients are summed over the ranks.

        Args:
            hidden: the same on all ranks.
        """
        return as_whole(copied(hidden, self.group), hidden)

    def joined(self, logits: Tensor) -> Tensor:
        """The logits of all tokens, on all ranks. Collective.

        Args:
            logits: those of this rank, (..., tokens of this rank).
        """
        return joined(logits, logits.dim() - 1, self.group, self.size)

    def maximum(self, values: Tensor) -> Tensor:
        """The greatest over the ranks, in place. Collective.

        Args:
            values: the greatest of this rank.
        """
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def sums(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The sums over the ranks. Collective.

        Args:
            values: summands of one shape.
        """
        together = torch.stack(values)
        dist.all_reduce(together, group=self.group)
        return together.unbind()


def cross_entropy_of_share(scores: Tensor, labels: Tensor, share: VocabularyShare) -> Tensor:
    """The cross-entropy of each token in nats, (tokens,), 0 where it is ignored. Collective.

    Args:
        scores: the logits of this rank, (tokens, tokens of this rank), float32 or float64.
        labels: (tokens,), int64; -100 is ignored.
        share: this rank's part of the vocabulary.
    """
    losses: Tensor = _CrossEntropyOfShare.apply(scores, labels, share)  # type: ignore[no-untyped-call]
    return losses


class _CrossEntropyOfShare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, labels: Tensor, share: VocabularyShare) -> Tensor:
        losses, gradients = losses_and_gradients(scores.clone(), labels, ctx.needs_input_grad[0], share)
        ctx.save_for_backward(gradients)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (gradients,) = ctx.saved_tensors
        return gradients * gradient.unsqueeze(-1), None, None


def losses_and_gradients(
    scores: Tensor, labels: Tensor, needs_gradient: bool, share: VocabularyShare | None = None
) -> tuple[Tensor, Tensor]:
    """The losses of tokens, and in place of their `scores` their gradients. Collective with a `share`.

    Args:
        scores: (tokens, vocabulary), or of this rank's part of it.
        labels: (tokens,), int64; -100 is ignored.
        needs_gradient: whether the gradients are computed.
        share: this rank's part of the vocabulary; None for all of it.
    """
    is_counted = labels.ne(IGNORE_INDEX)
    targets = labels.masked_fill(~is_counted, 0)
    is_own = is_counted
    if share is not None:
        targets = targets - share.start
        is_own = is_counted & (targets >= 0) & (targets < scores.shape[-1])
        targets = targets.masked_fill(~is_own, 0)
    targets = targets.unsqueeze(-1)
    own = scores.gather(-1, targets)
    largest = scores.amax(-1, keepdim=True)
    if share is not None:
        largest, own = share.maximum(largest), own.masked_fill(~is_own.unsqueeze(-1), 0.0)
    scores = scores.sub_(largest).exp_()
    sums = scores.sum(-1, keepdim=True)
    if share is not None:
        sums, own = share.sums(sums, own)
    losses = (sums.log() + largest - own).squeeze(-1).masked_fill(~is_counted, 0.0)
    if needs_gradient:
        ones = scores.new_full(targets.shape, -1.0)
        ones = ones if share is None else ones.masked_fill(~is_own.unsqueeze(-1), 0.0)
        scores = scores.div_(sums).scatter_add_(-1, targets, ones)
        scores = scores.masked_fill_(~is_counted.unsqueeze(-1), 0.0)
    return losses, scores
