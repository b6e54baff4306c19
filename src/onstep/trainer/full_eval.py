"""Casts the weights of a model for an evaluation (`bf16_full_eval`, `fp16_full_eval`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def cast_weights(module: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Give the floating-point parameters and buffers of a model another type; None does nothing.

    On exit they are the very tensors of before, so nothing is lost to rounding.
    """
    if dtype is None:
        yield
        return
    tensors = [one for one in chain(module.parameters(), module.buffers()) if one.is_floating_point()]
    before = [one.data for one in tensors]
    try:
        for one in tensors:
            one.data = one.data.to(dtype)
        yield
    finally:
        for one, data in zip(tensors, before, strict=True):
            one.data = data
