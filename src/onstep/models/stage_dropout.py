"""Lets each stage of a pipeline drop what one process would: the stages draw from one stream of random numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from onstep.models.layers.head_share import HeadShare
from onstep.models.layers.layer import Layer
from onstep.models.layers.sequence_context import SequenceContext


@dataclass(frozen=True)
class Draws:
    """What a part of a model draws in a forward pass."""

    widths: tuple[int, ...] = ()
    """Of the activations that it drops elements of, (batch, seq, width)."""
    heads: tuple[int, ...] = ()
    """The number of heads of each attention that drops weights."""

    @classmethod
    def of(cls, layer: nn.Module) -> Draws:
        """Those of a layer, with or without LoRA."""
        assert isinstance(layer, Layer)
        hidden = layer.attention.output.out_features
        widths = [hidden, hidden] if layer.dropout.p else []
        for module in layer.modules():
            for own in getattr(module, "lora_dropout", {}).values():
                widths += [module.in_features] if getattr(own, "p", 0.0) else []  # type: ignore[list-item]
        return cls(tuple(widths), (layer.attention.num_heads,) if layer.attention.dropout else ())

    def make(self, batch: int, length: int, context: SequenceContext) -> None:
        """Draw them from torch's generator of the CPU, and forget them."""
        for width in self.widths:
            torch.empty(batch, length, width).bernoulli_()
        for heads in self.heads:
            if context.documents is None or context.documents.masks_pairs(has_dropout=True) is not None:
                torch.empty(batch, heads, length, length).bernoulli_()
            else:
                torch.randint(2**62, ())  # the seed of attention in blocks


class StageDropout:
    """The random numbers of a stage among those of the whole model.

    On a CPU, a stage draws what the stages before it and after it do too. Generators of other devices draw by a seed
    from the CPU's and the stage, as their kernels draw in an order of their own.

    Args:
        before: what the parts of the model before the stage draw in a forward pass.
        after: what those after it draw.
        own: what its own draw.
        stage: its number.
        stages: their number.
    """

    def __init__(
        self, before: Sequence[Draws], after: Sequence[Draws], own: Sequence[Draws], stage: int, stages: int
    ) -> None:
        self._before, self._after = before, after
        self.draws = any(one.widths or one.heads for one in (*before, *own, *after))
        """Whether the model drops anything in training."""
        self.is_shared = True
        """Whether a stage on a CPU draws from the stream of all; else by a seed from it."""
        self._seeds = HeadShare(stage, stages)

    @contextmanager
    def around(self, tokens: Tensor, context: SequenceContext) -> Iterator[None]:
        """Context of a forward pass of the stage's layers in training.

        Args:
            tokens: (batch, seq), as on all stages.
            context: of these sequences.
        """
        if tokens.device.type != "cpu" or not self.is_shared:
            with self._seeds.own_stream(tokens.device):
                yield
            return
        batch, length = tokens.shape
        for one in self._before:
            one.make(batch, length, context)
        yield
        for one in self._after:
            one.make(batch, length, context)
