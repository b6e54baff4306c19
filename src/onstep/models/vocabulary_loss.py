"""Computes the cross-entropy of a large vocabulary in chunks of tokens: all logits never exist at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from onstep.models.layers.autocast import product_dtype, without_autocast
from onstep.models.multi_token_prediction import IGNORE_INDEX
from onstep.models.vocabulary_share import VocabularyShare, cross_entropy_of_share, losses_and_gradients

Reduction = Literal["none", "sum"]

CHUNK_BYTES = 2**30
"""Size of the float32 logits of a chunk. Smaller chunks cost time: each adds to the gradient of the whole head."""

FROZEN_CHUNK_BYTES = 2**28
"""The same for a head that is not trained, which has no gradient."""

LARGE_VOCABULARY = 65_536
"""The least vocabulary whose loss is computed in chunks unless it is configured."""


def tokens_of_chunk(vocabulary: int, *, is_trained: bool = True) -> int:
    """Number of tokens of a chunk, of a head that is trained or frozen."""
    return max(1, (CHUNK_BYTES if is_trained else FROZEN_CHUNK_BYTES) // (4 * vocabulary))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    reduction: Reduction = "sum",
    chunk: int | None = None,
    share: VocabularyShare | None = None,
) -> Tensor:
    """The cross-entropy in nats of the logits `hidden @ weight.T`, in float32, or float64 of float64.

    The sum computes its gradients with the losses, so it costs no second product of hidden states and weights; it
    cannot be differentiated twice. With "none", and in float16, whose gradients need the loss scale, the backward pass
    computes the logits of each chunk again.

    Args:
        hidden: (..., hidden); in autocast, the products are in its dtype.
        weight: (vocabulary, hidden), of the output head.
        labels: (...), int64; -100 is ignored.
        reduction: "none" returns the loss of every token, (...), 0 where ignored; "sum" their sum, ().
        chunk: number of tokens whose logits exist at once; by default as many as fit into 1 GiB of float32.
        share: the tokens of which this rank has the rows of `weight`, which makes this collective; None for all.
    """
    x, targets = hidden.flatten(0, -2), labels.flatten()
    size = chunk or tokens_of_chunk(weight.shape[0])
    dtype = product_dtype(x)
    if reduction == "sum" and dtype is not torch.float16:
        keeps = torch.is_grad_enabled()
        total: Tensor = _LinearCrossEntropy.apply(x, weight, targets, size, dtype, keeps, share)  # type: ignore[no-untyped-call]
        return total
    losses = cross_entropy_in_chunks(
        lambda part: linear(part, weight), x, targets, reduction=reduction, chunk=size, share=share
    )
    return losses.view_as(labels) if reduction == "none" else losses


def cross_entropy_in_chunks(
    logits: Callable[[Tensor], Tensor],
    hidden: Tensor,
    labels: Tensor,
    *,
    reduction: Reduction,
    chunk: int,
    share: VocabularyShare | None = None,
) -> Tensor:
    """The cross-entropy of `logits(hidden)` for any head; the backward pass computes each chunk's logits again.

    Args:
        logits: from (tokens, hidden) to (tokens, vocabulary).
        hidden: (tokens, hidden).
        labels: (tokens,), int64; -100 is ignored.
        share: the tokens whose logits this rank computes, which makes this collective; None for all.
    """

    def losses(part: Tensor, targets: Tensor) -> Tensor:
        scores = logits(part)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if share is not None:
            of_tokens = cross_entropy_of_share(scores, targets, share)
            return of_tokens if reduction == "none" else of_tokens.sum()
        return cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction=reduction)

    found = []
    for part, targets in zip(torch.split(hidden, chunk), torch.split(labels, chunk), strict=True):
        if torch.is_grad_enabled():
            found.append(checkpoint(losses, part, targets, use_reentrant=False))
        else:
            found.append(losses(part, targets))
    return torch.cat(found) if reduction == "none" else torch.stack(found).sum()


def logits_cross_entropy(logits: Tensor, labels: Tensor, *, chunk: int | None = None) -> Tensor:
    """The sum of the cross-entropy of logits that exist, in nats, without a float32 copy of all of them, ().

    Args:
        logits: (tokens, vocabulary), of any floating dtype.
        labels: (tokens,), int64; -100 is ignored.
        chunk: number of tokens that are converted to float32 at once; by default as many as fit into 1 GiB.
    """
    size = chunk or tokens_of_chunk(logits.shape[-1])
    total: Tensor = _LogitsCrossEntropy.apply(logits, labels, size)  # type: ignore[no-untyped-call]
    return total


class _LinearCrossEntropy(torch.autograd.Function):
    """Sums the losses, and computes the gradients for a gradient of 1 in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        dtype: torch.dtype,
        keeps: bool,
        share: VocabularyShare | None,
    ) -> Tensor:
        of_hidden, of_weight = (needed and keeps for needed in ctx.needs_input_grad[:2])
        wide = torch.promote_types(dtype, torch.float32)
        with without_autocast(hidden):
            x, w = hidden.to(dtype), weight.to(dtype)
            total = torch.zeros((), dtype=wide, device=x.device)
            hidden_parts: list[Tensor] = []  # list[Tensor]() is beyond torch.compile
            weight_grad = torch.zeros(w.shape, dtype=wide, device=w.device) if of_weight else None
            for part, targets in zip(torch.split(x, chunk), torch.split(labels, chunk), strict=True):
                loss, scores = _sum_and_gradient(linear(part, w).to(wide), targets, of_hidden or of_weight, share)
                total = total + loss
                scores = scores.to(dtype)
                if of_hidden:
                    hidden_parts.append(scores @ w)
                if weight_grad is not None and dtype is wide:
                    weight_grad.addmm_(scores.t(), part)
                elif weight_grad is not None:
                    weight_grad.add_(scores.t() @ part)
        hidden_grad = torch.cat(hidden_parts) if of_hidden else None
        ctx.save_for_backward(hidden_grad, weight_grad)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        grads = (
            None if grad is None else (grad * gradient).to(dtype)
            for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *grads, None, None, None, None, None


class _LogitsCrossEntropy(torch.autograd.Function):
    """Keeps the logits and the logarithm of each token's normalization; the gradient is written chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, chunk: int) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        total, ctx.chunk = torch.zeros((), dtype=wide, device=logits.device), chunk
        for part, targets in zip(torch.split(logits, chunk), torch.split(labels, chunk), strict=True):
            total = total + _sum_and_gradient(part.to(wide, copy=True), targets, False)[0]
        ctx.save_for_backward(logits, labels)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, labels = ctx.saved_tensors
        found, wide = torch.empty_like(logits), torch.promote_types(logits.dtype, torch.float32)
        parts = zip(
            torch.split(found, ctx.chunk), torch.split(logits, ctx.chunk), torch.split(labels, ctx.chunk), strict=True
        )
        for place, part, targets in parts:
            scores = _sum_and_gradient(part.to(wide, copy=True), targets, True)[1]
            place.copy_(scores.mul_(gradient))
        return found, None, None


def _sum_and_gradient(
    scores: Tensor, labels: Tensor, needs_gradient: bool, share: VocabularyShare | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of a chunk's losses, and in place of its `scores` (tokens, vocabulary) their gradients."""
    losses, gradients = losses_and_gradients(scores, labels, needs_gradient, share)
    return losses.sum(), gradients
