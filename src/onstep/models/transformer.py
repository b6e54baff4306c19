"""A decoder-only transformer of the Llama/Qwen2 family."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from onstep.config.parts import ModelConfig
from onstep.models.attention import Attention
from onstep.models.cache import KeyValueCache
from onstep.models.feed_forward import FeedForward
from onstep.models.init import init_weights
from onstep.models.rotary import RotaryTables
from onstep.models.sizes import check_model_config, head_width, vocabulary_size

IGNORE_INDEX = -100
"""A label that has no loss."""


class Layer(nn.Module):
    """Attention, then feed-forward, each on the normed residual stream and added to it."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.attention = Attention(config, index)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """(batch, seq, hidden) to the same shape."""
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin, cache))
        out: Tensor = x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))
        return out


class Transformer(nn.Module):
    """The model of a `ModelConfig`, with weights drawn by the rule of `onstep.models.init` from torch's global RNG.

    `config` is a copy: later changes to the one passed in do not reach the model. With tied embeddings there is no
    `output` module; the embedding matrix is read a second time.

    Raises:
        ConfigError: sizes that cannot work together, or no `vocab_size`.
    """

    def __init__(self, config: ModelConfig) -> None:
        check_model_config(config)
        super().__init__()
        self.config = dataclasses.replace(config)
        vocabulary = vocabulary_size(config)
        self.embedding = nn.Embedding(vocabulary, config.hidden_size)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.rotary = RotaryTables(head_width(config), config.rotary_base, config.seq_length)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.layernorm_epsilon)
        tied = config.share_embeddings_and_output_weights
        self.output = None if tied else nn.Linear(config.hidden_size, vocabulary, bias=False)
        init_weights(self, config)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        reduction: Literal["none", "sum"] = "none",
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Logits of the next token, or its loss where `labels` are given.

        Args:
            tokens: (batch, seq), int64. A sequence may be longer than `config.seq_length`: positions go on, but the
                model has not seen them in training.
            labels: (batch, seq), int64; `labels[:, t]` is the target of position t (already shifted), -100 is ignored.
            reduction: "none" gives the loss of every token, "sum" their sum; the caller divides by a count.
            cache: earlier positions, for generation; `tokens` follow them and are added.

        Returns:
            Without labels, logits (batch, seq, vocab) in the dtype of the computation. With labels, cross-entropy in
            nats, float32: (batch, seq) with 0 where ignored, or () for "sum".
        """
        logits = self.logits(self.hidden_states(tokens, cache))
        if labels is None:
            return logits
        losses = cross_entropy(
            logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction
        )
        return losses.view_as(labels) if reduction == "none" else losses

    def hidden_states(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The normed last residual stream, (batch, seq, hidden), from which `logits` reads."""
        start = 0 if cache is None else cache.length
        cos, sin = self.rotary(start, tokens.shape[1])
        x = self.dropout(self.embedding(tokens))
        for layer in self.layers:
            x = layer(x, cos, sin, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        normed: Tensor = self.final_norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of every token of the vocabulary, (..., hidden) to (..., vocab)."""
        return linear(hidden, self.embedding.weight if self.output is None else self.output.weight)

    def num_parameters(self, trainable_only: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of weights, shared ones counted once.

        Args:
            trainable_only: only those with `requires_grad`.
            exclude_embeddings: without the embedding matrix, and so without the output matrix where the two are tied.
        """
        return sum(
            parameter.numel()
            for parameter in self.parameters()
            if (parameter.requires_grad or not trainable_only)
            and not (exclude_embeddings and parameter is self.embedding.weight)
        )


def empty_transformer(config: ModelConfig) -> Transformer:
    """A float32 model on the CPU whose weights hold anything: for a caller who fills them all.

    Raises:
        ConfigError: as `Transformer`.
    """
    with torch.device("meta"):
        model = Transformer(config)
    return model.to_empty(device="cpu")


def build_transformer(config: ModelConfig, seed: int | None = None) -> Transformer:
    """A new float32 model on the CPU, its weights drawn by the rule of `onstep.models.init`.

    Args:
        seed: the weights follow from it alone, the same on every rank and for every device, and torch's global RNG is
            left as it was. None draws from the global RNG.

    Raises:
        ConfigError: as `Transformer`.
    """
    model = empty_transformer(config)
    generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
    init_weights(model, model.config, generator)
    return model
