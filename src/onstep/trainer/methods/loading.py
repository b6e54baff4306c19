"""Hugging Face's methods that create data loaders and samplers."""

from __future__ import annotations

from onstep.trainer.base_trainer import BaseTrainer


class LoadingMethods(BaseTrainer):
    """Hugging Face's methods that create data loaders and samplers."""
