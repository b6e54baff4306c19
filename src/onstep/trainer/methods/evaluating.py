"""Hugging Face's methods of an evaluation."""

from __future__ import annotations

from onstep.trainer.base_trainer import BaseTrainer


class EvaluatingMethods(BaseTrainer):
    """Hugging Face's methods of an evaluation."""
