"""The best plain PyTorch loop for a language model: nothing from onstep but model and data.

Fused AdamW, clipping, schedule; no read of the device that is not asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Loader(Protocol):
    """What both loops read from."""

    def read(self, num_microbatches: int) -> Any:
        """The micro-batches of the next step."""


def plain_adamw(model: nn.Module, lr: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
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


def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of a micro-batch."""
    loss: Tensor = model(batch["tokens"], batch["labels"], reduction="sum") / batch["labels"].numel()
    return loss


def plain_loop(
    model: nn.Module,
    loader: Loader,
    *,
    steps: int,
    lr: float,
    min_lr: float,
    warmup: int,
    weight_decay: float,
    betas: tuple[float, float],
    clip: float,
    after_step: Callable[[Tensor], None] | None = None,
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Tensor] = mean_loss,
) -> None:
    """Train for `steps` steps of one micro-batch; `after_step` is handed each step's loss."""
    optimizer = plain_adamw(model, lr, weight_decay, betas)
    parameters = list(model.parameters())
    model.train()
    for step in range(steps):
        rate = cosine_lr(step, lr=lr, min_lr=min_lr, warmup=warmup, steps=steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = loader.read(1).micro_batches[0]
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        if after_step is not None:
            after_step(loss)
