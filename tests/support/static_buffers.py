"""Emulates the replay of a CUDA graph on the CPU: outputs are in buffers that the next forward pass overwrites."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, buffer: Tensor) -> Tensor:
        buffer.copy_(value)
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Replay:
    """Gives each value of a forward pass a place in a static buffer; until then, the buffers hold no value."""

    def __init__(self) -> None:
        self.buffers: list[Tensor] = []
        self._next = 0

    def begin(self) -> None:
        """A forward pass begins: what the last one returned is overwritten."""
        self._next = 0
        for buffer in self.buffers:
            buffer.fill_(math.nan if buffer.is_floating_point() else 0)

    def output(self, value: Tensor) -> Tensor:
        """The value, in its place, with its graph."""
        if self._next == len(self.buffers):
            self.buffers.append(torch.empty_like(value, requires_grad=False))
        buffer = self.buffers[self._next]
        self._next += 1
        result: Tensor = _InPlace.apply(value, buffer)  # type: ignore[no-untyped-call]
        return result


def replayed(graph: Any, inputs: Any, **options: Any) -> Any:
    """A backend for `torch.compile` whose graphs return static buffers, as with `mode="reduce-overhead"` on a GPU."""
    replay = Replay()

    def run(*arguments: Any) -> Any:
        outputs = graph.forward(*arguments)
        replay.begin()
        return tree_map_only(Tensor, replay.output, outputs)

    return run


def register_replayed() -> str:
    """Make `replayed` known to `torch.compile`, once in a process; returns its name."""
    torch._dynamo.reset()
    name = replayed.__name__
    if name not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(replayed, name=name)
    return name
