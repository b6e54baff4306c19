"""Replace the loss of a language model: cross-entropy with label smoothing and a z-loss.

    python examples/own_loss.py

A forward step turns one micro-batch into a loss. It returns the sum of the losses and the number of tokens, so that the
step is exact for any split into micro-batches and ranks, and the parts of the loss to be logged beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from onstep import pretrain
from onstep.config import apply_overrides
from onstep.recipes import tiny_gpt_pretrain_config

SMOOTHING, Z_WEIGHT = 0.1, 1e-3


def smoothed_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> Any:
    """Cross-entropy against smoothed labels, plus the squared logarithm of the softmax's denominator."""
    batch = next(data_iterator)
    labels = batch["labels"].flatten()
    logits = model(batch["tokens"]).float().flatten(0, 1)
    nll = nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)
    z_loss = Z_WEIGHT * logits.logsumexp(-1)[labels != -100].square().sum()
    count = labels.ne(-100).sum()

    def loss_function(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, tuple[Tensor, Tensor]]]:
        return loss, count, {"smoothed nll": (nll.detach(), count), "z loss": (z_loss.detach(), count)}

    return nll + z_loss, loss_function


def main() -> None:
    torch.manual_seed(0)
    config = tiny_gpt_pretrain_config()
    apply_overrides(
        config,
        [
            "tokenizer.tokenizer_type=bytes",
            "model.num_layers=2",
            "model.hidden_size=64",
            "train.train_iters=60",
            "train.global_batch_size=8",
            "train.micro_batch_size=4",
            "scheduler.lr_warmup_iters=5",
            "logger.log_interval=10",
            "validation.eval_interval=null",
            "validation.eval_iters=2",
        ],
    )
    state = pretrain(config, smoothed_step)
    for record in state.info.log_history:
        if "z loss" in record:
            print("  ".join(f"{name} {record[name]:.4f}" for name in ("loss", "smoothed nll", "z loss")))


if __name__ == "__main__":
    main()
