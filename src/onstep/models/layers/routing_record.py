"""What routers count in a step, and the losses that reach the gradient without a place in the reported loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
"""The auxiliary losses of a router, in the order of a record."""

FIGURES = ("tokens", "dropped", "entropy", "micro_batches", *LOSSES)
"""What a record holds behind the experts' loads. `entropy` is a sum over tokens, in nats; the losses are sums over
micro-batches, without their coefficients."""


class RoutingStep:
    """What all routers of a model share while a step runs.

    A training loop sets it; without one every forward pass in training counts and the auxiliary losses are added to
    the gradient as they are, which is right for a backward pass that starts from 1.
    """

    def __init__(self) -> None:
        self.loss_scale: Tensor | float = 1.0
        """What the auxiliary losses are multiplied with in the backward pass, as the main loss is with its start."""
        self.counts = True
        """Whether forward passes count; a micro-batch that only fills up a step does not."""
        self.is_replay = False
        """Whether micro-batches run again, to look into a step: then nothing is counted, and no rank is waited for."""


class RoutingRecord:
    """The figures of one router since they were zeroed, as one row: `num_experts` loads, then `FIGURES`.

    In float64, where counts stay whole up to 2^53. The row lives where the router computes.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.row: Tensor | None = None
        """(num_experts + len(FIGURES),); None before the first forward pass in training. Whoever wants the figures of
        many routers in one tensor puts a row of it here."""

    @torch.no_grad()
    def add(self, load: Tensor, figures: Sequence[Tensor | float]) -> None:
        """Add one forward pass: `load` (num_experts,), and one value for each of `FIGURES`."""
        device = load.device
        if self.row is None or self.row.device != device:
            self.row = torch.zeros(self.num_experts + len(FIGURES), dtype=count_dtype(device), device=device)
        dtype = self.row.dtype
        rest = [
            one.detach().to(dtype) if isinstance(one, Tensor) else torch.full((), one, dtype=dtype, device=device)
            for one in figures
        ]
        self.row.add_(torch.cat([load.to(dtype), torch.stack(rest)]))


def count_dtype(device: torch.device) -> torch.dtype:
    """float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_recomputing() -> bool:
    """Whether this runs inside a backward pass: a forward pass there is a repetition, by activation checkpointing.

    What a forward pass counts must not be counted again there.
    """
    return bool(torch._C._current_graph_task_id() != -1)


def with_auxiliary_loss(x: Tensor, loss: Tensor, step: RoutingStep) -> Tensor:
    """`x` as it is; whoever goes back through it adds the gradient of `loss * step.loss_scale`.

    The scale is read in the backward pass, so that it may follow from what the loss function found out. The function is
    in the graph once, however often activation checkpointing repeats the forward pass.

    Args:
        loss: a tensor without dimensions.
    """
    dtype, device = loss.dtype, loss.device

    def start(gradient: Tensor) -> Tensor:
        scale = step.loss_scale
        if isinstance(scale, Tensor):
            return scale.to(dtype=dtype, device=device).reshape(())
        return torch.full((), scale, dtype=dtype, device=device)

    out: Tensor = _WithFurtherLoss.apply(x, loss, start)  # type: ignore[no-untyped-call]
    return out


def with_token_losses(losses: Tensor, further: Tensor, weight: float) -> Tensor:
    """`losses` as they are; their gradients are those of `losses + weight * further`.

    Args:
        losses: of any shape: of each token, or their sum.
        further: of the same shape.
    """
    dtype = further.dtype

    def start(gradient: Tensor) -> Tensor:
        return gradient.to(dtype) * weight

    out: Tensor = _WithFurtherLoss.apply(losses, further, start)  # type: ignore[no-untyped-call]
    return out


class _WithFurtherLoss(torch.autograd.Function):
    """Gives `x` as it is, and to the further loss the gradient that `start` makes of the one of `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, start: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.start = start
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.start(gradients[0]), None
