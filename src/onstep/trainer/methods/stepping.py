"""Hugging Face's methods of one micro-batch: inputs, precision, loss and backward pass."""

from __future__ import annotations

from onstep.trainer.base_trainer import BaseTrainer


class SteppingMethods(BaseTrainer):
    """Hugging Face's methods of one micro-batch: inputs, precision, loss and backward pass."""
