"""`loss.backward()` without what `Tensor.backward` does around torch's engine, a fifth of the step of a small model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

_PLAIN = Tensor.backward, torch.autograd.backward
_HAS_ENGINE = hasattr(torch.autograd, "_engine_run_backward")
_ones: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def run_backward(loss: Tensor) -> None:
    """Backward from a loss of one element.

    The engine starts from a 1 that is kept, instead of a new one for each step. What is not plain is left to
    `loss.backward()`: tensor subclasses, function modes, other shapes, and a `backward` that somebody replaced.
    """
    is_plain = type(loss) is Tensor and loss.ndim == 0 and not has_torch_function_unary(loss)
    if not (is_plain and _HAS_ENGINE and _PLAIN[0] is Tensor.backward and _PLAIN[1] is torch.autograd.backward):
        loss.backward()  # type: ignore[no-untyped-call]
        return
    key = loss.dtype, loss.device
    one = _ones.get(key)
    if one is None or one._version:  # a hook wrote to it
        one = _ones[key] = torch.ones_like(loss)
    torch.autograd._engine_run_backward(  # type: ignore[attr-defined]
        (loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )
