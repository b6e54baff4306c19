"""Keeps the losses of a training that its reports show."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class TrainingLosses:
    """The losses of one training; one that continues from a checkpoint continues them."""

    first: torch.Tensor | float | None = None
    """The loss of the first step, on the device until a checkpoint is saved."""
    logged: float | None = None
    """The loss of the newest record; None before the first."""
    restored: float | None = None
    """The loss of the last step before the checkpoint that this process continued from."""
    total: float = 0.0
    """The sum of the losses of `num_steps` logged steps."""
    num_steps: int = 0

    @property
    def mean(self) -> float:
        """The mean loss of a step; NaN before the first record."""
        return self.total / self.num_steps if self.num_steps else math.nan
