"""Hugging Face's methods that create and describe the optimizer and the scheduler."""

from __future__ import annotations

from onstep.trainer.base_trainer import BaseTrainer


class OptimizingMethods(BaseTrainer):
    """Hugging Face's methods that create and describe the optimizer and the scheduler."""
