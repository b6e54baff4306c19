"""Autocast on any device, also on "meta", which torch has none for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products with `x`: autocast's if it is enabled."""
    kind = x.device.type
    is_enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_enabled else x.dtype


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Computes in the dtypes of the tensors on the device of `x`."""
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
