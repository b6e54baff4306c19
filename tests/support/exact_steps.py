"""A model of a few weights with random gradients, and the bits of whatever an optimizer leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode


def stack(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Two matrices with a norm between them, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def fill_grads(model: nn.Module, seed: int, scale: float = 1.0, without: tuple[int, ...] = ()) -> None:
    """Give each parameter a random gradient, but for those at the places of `without`."""
    generator = torch.Generator().manual_seed(seed)
    for place, param in enumerate(model.parameters()):
        grad = (torch.randn(param.shape, generator=generator) * scale).to(param.device, param.dtype)
        param.grad = None if place in without else grad


def bits(value: Any) -> Any:
    """`value` with every tensor as its type and bytes, for an exact comparison; an iterable is a list."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(value, Mapping):
        return {key: bits(one) for key, one in value.items()}
    return [bits(one) for one in value] if isinstance(value, Iterable) and not isinstance(value, str) else value


class OpCounter(TorchDispatchMode):
    """Notes the operators that reach the dispatcher, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().split("::")[1].split(".")[0])
        return func(*args, **(kwargs or {}))


HOST_READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "_to_copy", "nonzero"}
"""Operators for which the host waits."""
