"""Records routing statistics of a step, and adds auxiliary losses to the gradient but not to the reported loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.distributed import ProcessGroup

LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")
"""Auxiliary losses of a router, in the order of a record."""

FIGURES = ("tokens", "dropped", "entropy", "micro_batches", *LOSSES)
"""Entries of a record after the experts' loads. `entropy` is a sum over tokens, in nats; the losses are sums over
micro-batches, without their coefficients."""


class RoutingStep:
    """State shared by all routers of a model during a step.

    Set by the training loop. Without one, every forward pass in training counts, and the auxiliary losses are added to
    the gradient unscaled, which is correct for a backward pass that starts from 1.
    """

    def __init__(self) -> None:
        self.loss_scale: Tensor | float = 1.0
        """Factor of the auxiliary losses in the backward pass, like the initial gradient of the main loss."""
        self.counts = True
        """Whether forward passes count; False for filler micro-batches."""
        self.collected: list[Tensor] | None = None
        """The auxiliary losses of the routers, with their coefficients, for a caller that adds them to the loss itself,
        as the stages of a pipeline do; None to add their gradients here."""
        self.is_replay = False
        """Whether micro-batches are rerun to diagnose a step: nothing is counted, and there is no communication."""
        self.group: ProcessGroup | None = None
        """The ranks whose tokens differ, over which choices are counted; None for all ranks."""


class RoutingRecord:
    """The statistics of one router since the last reset, as one row: `num_experts` loads, then `FIGURES`.

    In float64, where counts are exact up to 2^53. The row is on the router's device.
    """

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.row: Tensor | None = None
        """(num_experts + len(FIGURES),); None before the first forward pass in training. To collect the statistics of
        many routers in one tensor, assign a row of that tensor here."""

    @torch.no_grad()
    def add(self, load: Tensor, figures: Sequence[Tensor | float]) -> None:
        """Add a forward pass: `load` (num_experts,), and one value for each of `FIGURES`."""
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
    """float64 if the device supports it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def is_recomputing() -> bool:
    """Whether this runs inside a backward pass, where a forward pass is a recomputation by activation checkpointing.

    Statistics of a forward pass must not be counted again there.
    """
    return bool(torch._C._current_graph_task_id() != -1)


@_disable_dynamo
def with_auxiliary_loss(x: Tensor, loss: Tensor, step: RoutingStep) -> Tensor:
    """`x` unchanged; its backward pass adds the gradient of `loss * step.loss_scale`.

    The scale is read in the backward pass, so it may depend on what the loss function determined. The function is in
    the graph once, however often activation checkpointing repeats the forward pass. It is not compiled, which would
    read the scale in the forward pass.

    Args:
        loss: a 0-d tensor.
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
    """`losses` unchanged, with the gradients of `losses + weight * further`.

    Args:
        losses: per-token losses of any shape, or their sum.
        further: additional losses of the same shape.
    """
    dtype = further.dtype

    def start(gradient: Tensor) -> Tensor:
        return gradient.to(dtype) * weight

    out: Tensor = _WithFurtherLoss.apply(losses, further, start)  # type: ignore[no-untyped-call]
    return out


class _WithFurtherLoss(torch.autograd.Function):
    """Returns `x` unchanged; in the backward pass, applies `start` to the gradient of `x` to get that of the loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, start: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.start = start
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.start(gradients[0]), None
