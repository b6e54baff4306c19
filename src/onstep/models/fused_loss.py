"""Computes a head and its cross-entropy in one kernel of liger-kernel, on a GPU."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TypeGuard

import torch
from torch import Tensor, nn

from onstep.config import ModelConfig
from onstep.errors import ConfigError, MissingExtraError
from onstep.models.multi_token_prediction import IGNORE_INDEX

KEY = "model.fused_linear_loss"


def is_plain_head(head: nn.Module) -> TypeGuard[nn.Linear | nn.Embedding]:
    """Whether a head is a matrix alone: a linear layer without a bias, or the embedding."""
    return type(head) is nn.Embedding or (type(head) is nn.Linear and head.bias is None)


def check_fused_loss(config: ModelConfig, device: torch.device) -> None:
    """Refuse `model.fused_linear_loss` without a GPU (ConfigError) or without liger-kernel (MissingExtraError)."""
    if not config.fused_linear_loss:
        return
    if device.type != "cuda":
        raise ConfigError(
            f"{KEY}=true requires a GPU, whose kernels liger-kernel compiles, and this run computes on {device.type}; "
            "set it to false: model.chunked_loss needs no more memory."
        )
    if find_spec("liger_kernel") is None:
        raise MissingExtraError(f"{KEY}=true requires liger-kernel: pip install liger-kernel")


def fused_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of the cross-entropy of the logits `hidden @ weight.T`, in nats, ().

    Args:
        hidden: (tokens, hidden), in the type of the products.
        weight: (vocabulary, hidden).
        labels: (tokens,), int64; -100 is ignored.
    """
    liger = import_module("liger_kernel.transformers.fused_linear_cross_entropy")
    loss: Tensor = liger.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORE_INDEX, reduction="sum")(
        weight.to(hidden.dtype), hidden, labels
    )
    return loss.float()
