"""Keeps the context within the length that a model was trained on, by a window that slides over longer texts."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models.hf.causal_lm import CausalLM
from onstep.models.layers.rotary import RotaryTables, scaling_type
from onstep.models.sizes import head_width
from onstep.models.transformer import Transformer

ROPE_SCALINGS = ("linear", "dynamic")
"""What `extend_context` offers."""


def context_length(config: ModelConfig) -> int:
    """The number of positions that a model of `config` attends to: its trained length, `seq_length`.

    Dynamic rope scaling extends it by its factor: its angles change beyond `seq_length`.
    """
    scaling = config.rope_scaling
    if config.position_embedding_type != "rope" or not scaling or scaling_type(scaling) != "dynamic":
        return config.seq_length
    return max(config.seq_length, math.floor(config.seq_length * float(scaling.get("factor") or 1.0)))


class ContextWindow:
    """The part of a growing text that a model sees: at most `length` tokens, the newest included.

    A full window drops its oldest quarter at once, and what is left is encoded again as the beginning of a text. Moving
    it by single tokens would cost a pass over the whole window for each of them, and keeping the keys of dropped
    tokens' neighbors would not help: they were computed from what is no longer seen.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self.start = 0
        """The first token in the window."""

    def include(self, end: int) -> bool:
        """Move the window, if necessary, so that it ends at token `end` (exclusive); returns whether it moved."""
        if end - self.start <= self.length:
            return False
        self.start = end - (self.length - self.length // 4)
        return True


@torch.no_grad()
def token_losses(model: Transformer, tokens: Tensor) -> Tensor:
    """The loss of each token but the first, given what `generate` sees when it chooses the token after.

    Positions beyond the trained length thus have the window's context, as generated text has.

    Args:
        tokens: (batch, seq), int64.

    Returns:
        (batch, seq - 1), float32, in nats; entry i is the loss of token i + 1.
    """
    window = ContextWindow(context_length(model.config))
    losses = []
    known, last = 0, tokens.shape[1] - 1
    while known < last:
        window.include(known + 1)
        end = min(window.start + window.length, last)
        hidden = model.hidden_states(tokens[:, window.start : end])[:, known - window.start :]
        losses.append(model.cross_entropy(hidden, tokens[:, known + 1 : end + 1], "none"))
        known = end
    return torch.cat(losses, dim=1)


def extend_context(model: Transformer | CausalLM, scaling: str, factor: float) -> None:
    """Let `model`, which is changed, attend to `factor` times its trained length, by scaling rotary positions.

    Args:
        model: a model with rotary positions that are not scaled yet.
        scaling: "linear" divides all positions by the factor; "dynamic" changes the angles of a text only once it is
            longer than the trained length, by as much as its length requires.
        factor: above 1.

    Raises:
        ConfigError: for a model without rotary positions or with scaled ones, or a value out of range.

    Source: Chen et al., "Extending Context Window of Large Language Models via Positional Interpolation" (2023), for
    linear; "dynamic NTK" as in `transformers`.
    """
    config = model.config
    if scaling not in ROPE_SCALINGS:
        raise ConfigError(f"rope scaling must be one of {', '.join(ROPE_SCALINGS)}, got {scaling!r}.")
    if isinstance(model, CausalLM):
        raise ConfigError(
            f"rope scaling {scaling!r} is an option of Onstep's own models, and this one is a class of transformers; "
            f"set rope_scaling in its config.json instead."
        )
    if model.rotary is None:
        raise ConfigError(
            f"rope scaling {scaling!r} requires rotary positions, and this model has "
            f"position_embedding_type={config.position_embedding_type}; drop the option."
        )
    if config.rope_scaling:
        raise ConfigError(
            f"the model's positions are scaled already (rope_scaling={dict(config.rope_scaling)}); drop the option."
        )
    if not (math.isfinite(factor) and factor > 1):
        raise ConfigError(
            f"the factor of rope scaling must be a finite number > 1, got {factor!r}; 2 doubles the context."
        )
    extended = copy.deepcopy(config)
    extended.rope_scaling = {"rope_type": scaling, "factor": float(factor)}
    if scaling == "linear":
        extended.seq_length = math.floor(config.seq_length * factor)
    device = model.rotary.cos.device
    tables = RotaryTables(head_width(extended), extended.rotary_base, extended.seq_length, extended.rope_scaling)
    model.config, model.rotary = extended, tables.to(device)
