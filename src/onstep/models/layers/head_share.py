"""Drops attention weights where each tensor-parallel rank has some of the heads: as in one process where it can."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True)
class HeadShare:
    """This rank's part of the heads of an attention."""

    rank: int
    """The place of this rank among those that divide the heads."""
    ranks: int
    """Their number."""

    @contextmanager
    def own_stream(self, device: torch.device) -> Iterator[None]:
        """Context in which random numbers are this rank's own, so that masks of different heads differ.

        Its seed is drawn from the stream that all ranks share, which thus needs no state of its own in a checkpoint.

        Args:
            device: where the numbers are drawn.
        """
        seed = int(torch.randint(2**62, ()))
        with torch.random.fork_rng([device] if device.type != "cpu" else [], device_type=device.type):
            torch.manual_seed(seed + self.rank)
            yield

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, **options: Any) -> Tensor:
        """torch's `scaled_dot_product_attention` of these heads. On a CPU, the weights that one process drops.

        Args:
            query: (batch, heads of this rank, seq, width).
            key: (batch, groups of this rank, keys, width).
            value: as `key`.
            dropout_p: probability at which an attention weight is dropped, above 0.
            options: as torch's.
        """
        if query.device.type != "cpu":
            with self.own_stream(query.device):
                return scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, **options)
        batch, heads, length, _ = query.shape
        drawn = query.new_empty(batch, heads * self.ranks, length, key.shape[2]).bernoulli_(1 - dropout_p)
        kept = drawn.narrow(1, heads * self.rank, heads).bool()
        attended: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, options.pop("attn_mask"), dropout_p, dropout_mask=kept, **options
        )[0]
        return attended
