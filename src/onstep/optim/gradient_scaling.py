"""Scales and clips gradients by one factor, which may be on their device."""

from __future__ import annotations

import torch
from torch import Tensor


def clip_factor(
    clip_grad: float | None, norm: Tensor, known_norm: float | None, grad_scale: Tensor | None
) -> Tensor | None:
    """The factor that scales and clips gradients, 0-d; None if it is known to be 1.

    Args:
        norm: their norm after scaling, 0-d.
        known_norm: the same on the host, if known.
    """
    if not clip_grad or (known_norm is not None and known_norm < clip_grad * 0.999 - 1e-6):
        return grad_scale
    factor = torch.clamp(clip_grad / (norm + 1e-6), max=1.0)
    return factor if grad_scale is None else factor * grad_scale


def multiply(grads: list[Tensor], factor: Tensor, *, spans_devices: bool) -> None:
    """Multiply gradients, on one device or several, by a 0-d factor."""
    if spans_devices:
        for grad in grads:
            grad.mul_(factor.to(grad.device))
    else:
        torch._foreach_mul_(grads, factor)


def like(norm: Tensor, factor: Tensor | float) -> Tensor:
    """`factor` as a 0-d tensor of the norm's type and device; a number is moved without a blocking copy."""
    if isinstance(factor, Tensor):
        return factor.to(norm)
    return torch.full_like(norm, factor)
