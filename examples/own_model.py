"""Train a module of your own with the Trainer: a small network that tells two interleaved half-moons apart.

    python examples/own_model.py

Shows a dataset, an evaluation with a metric of its own, early stopping, and what the run leaves in `runs/own_model`.
Start it again, and it trains again; interrupt it, and the next start continues.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from onstep import Trainer, TrainingArguments
from onstep.callbacks import EarlyStopping


class HalfMoons(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Points on two half circles, with noise, and the half circle that each belongs to."""

    def __init__(self, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.arange(size) % 2
        angle = torch.rand(size, generator=generator) * math.pi
        upper = torch.stack([angle.cos(), angle.sin()], dim=1)
        lower = torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)
        points = torch.where(self.labels.bool().unsqueeze(1), lower, upper)
        self.points = points + 0.1 * torch.randn(size, 2, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.points[index], "labels": self.labels[index]}


class Classifier(nn.Module):
    """Two hidden layers; returns the loss and the scores of both classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.layers(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "scores": scores}


def accuracy(prediction: Any) -> dict[str, float]:
    """The share of points on the right half-moon."""
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def main() -> None:
    torch.manual_seed(0)
    args = TrainingArguments(
        "runs/own_model",
        learning_rate=0.01,
        per_device_train_batch_size=32,
        num_train_epochs=20,
        eval_strategy="epoch",
        logging_steps=32,
        seed=0,
    )
    trainer = Trainer(
        Classifier(),
        args,
        train_dataset=HalfMoons(1024, seed=1),
        eval_dataset=HalfMoons(256, seed=2),
        compute_metrics=accuracy,
        callbacks=[EarlyStopping("accuracy", mode="max", patience=5, stop_at=0.995)],
    )
    trainer.train()
    print(f"accuracy on held-out points: {trainer.evaluate()['eval_accuracy']:.3f}")


if __name__ == "__main__":
    main()
