"""Losses that reach the gradient without a place in the loss that is reported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onstep.models.routing_record import RoutingStep


def with_auxiliary_loss(x: Tensor, loss: Tensor, step: RoutingStep) -> Tensor:
    """`x` as it is; whoever goes back through it adds the gradient of `loss * step.loss_scale`.

    The scale is read in the backward pass, so that it may follow from what the loss function found out. The function is
    in the graph once, however often activation checkpointing repeats the forward pass.

    Args:
        loss: a tensor without dimensions.
    """
    out: Tensor = _WithAuxiliaryLoss.apply(x, loss, step)  # type: ignore[no-untyped-call]
    return out


def with_token_losses(losses: Tensor, further: Tensor, weight: float) -> Tensor:
    """`losses` as they are; their gradients are those of `losses + weight * further`.

    Args:
        losses: of any shape: of each token, or their sum.
        further: of the same shape.
    """
    out: Tensor = _WithTokenLosses.apply(losses, further, weight)  # type: ignore[no-untyped-call]
    return out


class _WithAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, step: RoutingStep) -> Tensor:
        ctx.step, ctx.dtype, ctx.device = step, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        scale = ctx.step.loss_scale
        if isinstance(scale, Tensor):
            start = scale.to(dtype=ctx.dtype, device=ctx.device).reshape(())
        else:
            start = torch.full((), scale, dtype=ctx.dtype, device=ctx.device)
        return gradients[0], start, None


class _WithTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, further: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.dtype = weight, further.dtype
        return losses.view_as(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], gradients[0].to(ctx.dtype) * ctx.weight, None
