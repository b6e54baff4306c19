"""The module whose signature and loss count, inside what others wrap around it."""

from __future__ import annotations

from typing import Any

from torch import nn

from onstep.events.context import unwrap


def inner_module(module: nn.Module) -> nn.Module:
    """The user's module without data-parallel, compile and PEFT wrappers."""
    inner: Any = unwrap(module)
    get_base_model = getattr(inner, "get_base_model", None)
    base: nn.Module = get_base_model() if callable(get_base_model) else inner
    return base
