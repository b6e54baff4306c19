"""Training and evaluation mode of a model's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def kept_modes(models: Iterable[nn.Module]) -> Iterator[None]:
    """Afterwards every submodule is in the mode that it had (a frozen one may have its own), also after an error."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
