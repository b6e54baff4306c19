"""A small module in Lightning's form over any base class, and its data."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

SCHEDULES = ("none", "lists", "step", "every-3-steps", "plateau", "two")


def net_of(base: type) -> Any:
    """The class of the module, derived from `base`."""

    class Net(base):
        def __init__(self, schedule: str = "none", lr: float = 0.05, dropout: float = 0.0) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))

        def loss(self, batch: list[Tensor]) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self.layers(x).squeeze(-1), y)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
            return {"loss": loss, "size": len(batch[0])} if self.hparams.schedule == "lists" else loss

        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            loss = self.loss(batch)
            self.log("val_loss", loss, sync_dist=True)
            self.log_dict({"val_worst": loss}, reduce_fx="max", sync_dist=True)
            self.log("val_batches", 1.0, reduce_fx="sum", sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            steps = self.trainer.estimated_stepping_batches
            return configured(self.hparams.schedule, optimizer, steps)

    return Net


def configured(schedule: str, optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """What `configure_optimizers` returns, in each of its forms."""
    if schedule == "none":
        return optimizer
    if schedule == "lists":
        return [optimizer], [lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]
    if schedule == "step":
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
    if schedule == "every-3-steps":
        rows = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step", "frequency": 3}
        return [optimizer], [rows]
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3, threshold=0.5)
    if schedule == "plateau":
        return {"optimizer": optimizer, "lr_scheduler": plateau, "monitor": "val_loss"}
    every_second = {"scheduler": lr_scheduler.ExponentialLR(optimizer, 0.5), "frequency": 2}
    return [optimizer], [every_second, {"scheduler": plateau, "monitor": "train_loss_epoch"}]


def loaders(*, shuffles: bool = False, batch: int = 4) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of 48 samples for training and 18 for validation, whose last batch is smaller."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(66, 4, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.1 * torch.randn(66, generator=generator)
    train, validation = TensorDataset(x[:48], y[:48]), TensorDataset(x[48:], y[48:])
    return DataLoader(train, batch_size=batch, shuffle=shuffles), DataLoader(validation, batch_size=batch)
