"""The best plain PyTorch loop for the tiny model: nothing from onstep but model and data."""

from __future__ import annotations

import math
from typing import Any

import torch

from onstep.data import TrainLoader
from onstep.models import Transformer


def plain_adamw(model: torch.nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]) -> Any:
    """Fused AdamW; matrices decay, vectors do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=betas, eps=1e-8, fused=True)


def cosine_lr(step: int, *, lr: float, min_lr: float, warmup: int, steps: int) -> float:
    """The rate of the step after `step` completed ones."""
    if step < warmup:
        return lr * step / warmup
    ratio = (step - warmup) / (steps - warmup)
    return min_lr + (lr - min_lr) * 0.5 * (1.0 + math.cos(math.pi * ratio))


def plain_losses(
    model: Transformer,
    loader: TrainLoader,
    *,
    steps: int,
    lr: float,
    min_lr: float,
    warmup: int,
    weight_decay: float,
    betas: tuple[float, float],
    clip: float,
) -> list[float]:
    """Train and return the loss of each step."""
    optimizer = plain_adamw(model, lr, weight_decay, betas)
    parameters = list(model.parameters())
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(step, lr=lr, min_lr=min_lr, warmup=warmup, steps=steps)
        batches = loader.read(1)
        assert batches is not None
        batch = batches.micro_batches[0]
        optimizer.zero_grad()
        loss = model(batch["tokens"], batch["labels"], reduction="sum") / batch["labels"].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        losses.append(loss.item())
    return losses
