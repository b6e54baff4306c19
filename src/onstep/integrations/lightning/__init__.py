"""Trains a `LightningModule` with Onstep's `Trainer`. Lightning need not be installed."""

from onstep.integrations.lightning.modules import LightningDataModule, LightningModule
from onstep.integrations.lightning.trainer import LightningTrainer

__all__ = ["LightningDataModule", "LightningModule", "LightningTrainer"]
