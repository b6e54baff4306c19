"""Chooses which activations a layer keeps for the backward pass, and which it computes again there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from onstep.config import ModelConfig
from onstep.errors import ConfigError

_ATEN = torch.ops.aten
_EXPENSIVE = frozenset(
    getattr(_ATEN, name)
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
    if hasattr(_ATEN, name)
)
"""Matrix products and attention, whose results `selective` keeps."""


def is_recomputed(config: ModelConfig, index: int) -> bool:
    """Whether the layer of this index computes activations again in the backward pass."""
    return config.recompute_granularity is not None and index % config.recompute_interval == 0


def recomputed(layer: nn.Module, config: ModelConfig, *inputs: Any) -> Tensor:
    """The output of a layer that is recomputed as `model.recompute_granularity` says."""
    out: Tensor = checkpoint(layer, *inputs, use_reentrant=False, **checkpoint_options(config))
    return out


def checkpoint_options(config: ModelConfig) -> dict[str, Any]:
    """The further keywords of `torch.utils.checkpoint.checkpoint`."""
    return {"context_fn": selective_contexts} if config.recompute_granularity == "selective" else {}


def _policy(context: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = getattr(op, "overloadpacket", op) in _EXPENSIVE
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


selective_contexts = partial(create_selective_checkpoint_contexts, _policy)
"""Gives the contexts of a forward pass and its recomputation, which keep the results of products and attention."""


def recompute_in(model: Any, config: ModelConfig) -> None:
    """Make a model of `transformers` recompute its activations by its own method, as `model.recompute_*` say.

    Raises:
        ConfigError: for a model without the method, or without its option for every n-th layer.
    """
    interval, options = config.recompute_interval, {"use_reentrant": False, **checkpoint_options(config)}
    enable = getattr(model, "activation_checkpointing_enable", None)
    if callable(enable):
        enable(options, every_n_layers=interval)
        return
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if not callable(enable):
        raise ConfigError(
            f"model.recompute_granularity={config.recompute_granularity} requires a model with "
            f"gradient_checkpointing_enable, which {type(model).__name__} does not have; leave it out, and call "
            "torch.utils.checkpoint.checkpoint in its forward."
        )
    if interval != 1:
        raise ConfigError(
            f"model.recompute_interval={interval} requires a model with activation_checkpointing_enable, which "
            f"{type(model).__name__} does not have; use 1."
        )
    enable(options)
