"""Implements attention by blocks of queries, whose scores and masks are computed again in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_MOST_ROWS = 128
"""Queries in a block."""

_MOST_SCORES = 2**26
"""Number of scores that a block of more than one query has."""


def seen_by(first: Tensor, start: int, end: int, begin: int = 0) -> Tensor:
    """(batch, end - start, end - begin), bool: which keys from `begin` on the queries from `start` on attend to.

    Args:
        first: (batch, seq), the position of the first token of each token's document.
    """
    queries, keys = torch.arange(start, end, device=first.device), torch.arange(begin, end, device=first.device)
    return (keys >= first[:, start:end, None]) & (keys <= queries[:, None])


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, first: Tensor, dropout_p: float = 0.0) -> Tensor:
    """Causal attention within documents, (batch, seq, heads, width), for any device and dtype, also compiled.

    Only the arguments are kept for the backward pass, and no more than the scores of a block of queries exist at once.
    Nothing waits for the device.

    Args:
        query: (batch, seq, heads, width).
        key: (batch, seq, groups, width), as is `value`; heads are a multiple of groups.
        first: (batch, seq), the position of the first token of each token's document.
        dropout_p: probability at which an attention weight is dropped, by a seed from torch's random state of the CPU.

    Source: the gradient as in Dao et al., "FlashAttention" (2022), appendix B.2.
    """
    seed = torch.randint(2**62, (), device="cpu") if dropout_p else None
    attended: Tensor = _attend(query, key, value, first, seed, dropout_p)
    return attended


@torch.library.custom_op("onstep::attend_in_blocks", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, first: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    attended = torch.empty_like(query, memory_format=torch.contiguous_format)
    groups, kept = key.shape[2], _Kept(seed, dropout_p, query.device)
    for begin, start, end in _blocks(query, first):
        q, k, v = _by_group(query[:, start:end], groups), *(x[:, begin:end].transpose(1, 2) for x in (key, value))
        weights = _weights(q, k, seen_by(first, start, end, begin))
        attended[:, start:end] = _by_position(kept(weights).type_as(v) @ v, end - start)
    return attended


@torch.library.custom_op("onstep::attend_in_blocks_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, seed: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor, Tensor]:
    of_query, of_key, of_value = (
        torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (query, key, value)
    )
    groups, kept, scale = key.shape[2], _Kept(seed, dropout_p, query.device), query.shape[3] ** -0.5
    for begin, start, end in _blocks(query, first):
        q, out = (_by_group(x[:, start:end], groups) for x in (query, gradient))
        k, v = (x[:, begin:end].transpose(1, 2) for x in (key, value))
        weights = _weights(q, k, seen_by(first, start, end, begin))
        of_value[:, begin:end] += (kept(weights).type_as(v).transpose(-2, -1) @ out).transpose(1, 2)
        of_weights = kept.again((out @ v.transpose(-2, -1)).type_as(weights))
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        of_scores = of_scores.type_as(q)
        of_query[:, start:end] = _by_position(of_scores @ k, end - start)
        of_key[:, begin:end] += (of_scores.transpose(-2, -1) @ q).transpose(1, 2)
    return of_query, of_key, of_value


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, first: Tensor, seed: Tensor | None, dropout_p: float) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@_attend_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, first: Tensor, seed: Tensor | None, dropout_p: float
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (query, key, value))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.dropout_p = inputs
    ctx.save_for_backward(*tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    found = _attend_backward(gradient, *ctx.saved_tensors, ctx.dropout_p)
    return (*found, None, None, None)


_attend.register_autograd(_gradients, setup_context=_keep)


def _blocks(query: Tensor, first: Tensor) -> Iterator[tuple[int, int, int]]:
    """The blocks of queries, and before them the first key that any of these attends to, if that is known here."""
    batch, length, heads, _ = query.shape
    rows, is_host = max(1, min(_MOST_ROWS, _MOST_SCORES // (batch * heads * length))), first.device.type == "cpu"
    for start in range(0, length, rows):
        yield int(first[:, start].min()) if is_host else 0, start, min(start + rows, length)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """(batch, rows, heads, width) to (batch, groups, heads / groups * rows, width)."""
    batch, rows, heads, width = x.shape
    return x.reshape(batch, rows, groups, heads // groups, width).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _by_position(x: Tensor, rows: int) -> Tensor:
    """(batch, groups, heads / groups * rows, width) to (batch, rows, heads, width)."""
    batch, groups, _, width = x.shape
    return x.reshape(batch, groups, -1, rows, width).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _weights(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """The softmax of the scores, (batch, groups, heads / groups * rows, keys), at least float32.

    Args:
        query: (batch, groups, heads / groups * rows, width).
        key: (batch, groups, keys, width).
        seen: (batch, rows, keys).
    """
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    batch, rows, keys = seen.shape
    scores.view(batch, scores.shape[1], -1, rows, keys).masked_fill_(~seen[:, None, None], -math.inf)
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32))


class _Kept:
    """Drops attention weights, block by block, by random numbers that depend on `seed` alone."""

    def __init__(self, seed: Tensor | None, dropout_p: float, device: torch.device) -> None:
        self._share = 1.0 - dropout_p
        self._generator = None if seed is None else torch.Generator(device).manual_seed(int(seed))
        self._factors: Tensor | None = None

    def __call__(self, weights: Tensor) -> Tensor:
        """`weights` of the next block, without those that are dropped and divided by the share of the others."""
        if self._generator is not None:
            drawn = torch.empty_like(weights).bernoulli_(self._share, generator=self._generator)
            self._factors = drawn.div_(self._share) if self._share else drawn
        return self.again(weights)

    def again(self, gradient: Tensor) -> Tensor:
        """Likewise by the numbers of the last block."""
        return gradient if self._factors is None else gradient * self._factors
