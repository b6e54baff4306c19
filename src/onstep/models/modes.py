"""Preserves the training or evaluation mode of a model's modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def preserve_modes(models: Iterable[nn.Module]) -> Iterator[None]:
    """Restore the mode of every submodule on exit, also after an error; frozen ones may differ from the rest."""
    modes = {module: module.training for model in models for module in model.modules()}
    try:
        yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
