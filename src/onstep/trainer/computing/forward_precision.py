"""Computes a model's `forward` in mixed precision, with outputs in float32, as `accelerate` prepares models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from onstep.models.hf.deferred_logits import DeferredLogits
from onstep.training.run import Run


@contextmanager
def autocast_in_forward(module: nn.Module, run: Run) -> Iterator[None]:
    """Context in which autocast covers the `forward` of a model, and no longer the loss that is computed around it."""
    own, is_replaced = module.forward, "forward" in vars(module)
    cast_forward(module, run.precision)
    run.autocasts_forward_only = True
    try:
        yield
    finally:
        run.autocasts_forward_only = False
        if is_replaced:
            module.forward = own
        else:
            del module.forward


def cast_forward(module: nn.Module, precision: Callable[[], AbstractContextManager[object]]) -> None:
    """Let a module's `forward` compute in `precision`, and return float32."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with precision():
            outputs = own(*args, **kwargs)
        return in_float32(outputs)

    forward.__wrapped__ = own  # type: ignore[attr-defined]  # its signature is read
    module.forward = forward


def in_float32(outputs: Any) -> Any:
    """Outputs whose tensors of 16 bits are float32, inside of mappings, tuples and lists, too."""
    if isinstance(outputs, DeferredLogits):
        return outputs.in_float32()
    if isinstance(outputs, Tensor):
        return outputs.float() if outputs.dtype in (torch.bfloat16, torch.float16) else outputs
    if isinstance(outputs, Mapping):
        return type(outputs)({key: in_float32(value) for key, value in outputs.items()})  # type: ignore[call-arg]
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*map(in_float32, outputs))
    if isinstance(outputs, (tuple, list)):
        return type(outputs)(map(in_float32, outputs))
    return outputs
