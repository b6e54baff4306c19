"""Implements multi-token prediction: additional layers that predict tokens beyond the next one during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from onstep.config import ModelConfig
from onstep.models.layers.layer import build_norm
from onstep.models.layers.routing_record import RoutingStep, count_dtype, is_recomputing, with_token_losses

IGNORE_INDEX = -100
"""Label of positions without a loss."""

Embed = Callable[[int], Tensor]
"""Returns the embeddings (batch, seq, hidden) of the tokens that many positions later."""

RunLayer = Callable[[nn.Module, Tensor], Tensor]
"""Applies a transformer layer to hidden states (batch, seq, hidden)."""

CrossEntropy = Callable[[Tensor, Tensor, Literal["none", "sum"]], Tensor]
"""Returns the losses of hidden states (batch, seq, hidden) for labels (batch, seq): of each token, or their sum."""


class PredictionDepth(nn.Module):
    """One depth: maps the hidden states of the previous depth and embeddings of later tokens to new hidden states.

    Args:
        layer: a transformer layer like the model's last one.
    """

    def __init__(self, config: ModelConfig, layer: nn.Module) -> None:
        super().__init__()
        self.embedding_norm = build_norm(config)
        self.hidden_norm = build_norm(config)
        self.projection = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        nn.init.normal_(self.projection.weight, 0.0, config.init_method_std)
        self.layer = layer
        self.final_norm = build_norm(config)

    def forward(self, hidden: Tensor, embedded: Tensor, run_layer: RunLayer) -> Tensor:
        """The normed hidden states (batch, seq, hidden) for the output head and the next depth."""
        x = self.projection(torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1))
        normed: Tensor = self.final_norm(run_layer(self.layer, x))
        return normed


class MultiTokenPrediction(nn.Module):
    """`mtp_num_layers` depths; at each position, depth `d` predicts the token `d` positions after the next one.

    Embedding and output head are shared with the model. The gradient of
    `mtp_loss_scaling_factor / mtp_num_layers` times the sum of the depths' losses is added to that of the main loss,
    with the same token weights and the same divisor; the reported loss is the main loss alone.

    Source: DeepSeek-V3 (2024), section 2.2, equations 21-25; norms and their order follow Megatron-Core.
    """

    def __init__(self, config: ModelConfig, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.depths = nn.ModuleList(PredictionDepth(config, layer) for layer in layers)
        self.step = RoutingStep()
        self.record: Tensor | None = None
        """(depths, 2): sum of losses and number of labels of each depth, accumulated in training."""
        self._weight = config.mtp_loss_scaling_factor / len(layers)

    def attach(
        self,
        losses: Tensor,
        hidden: Tensor,
        labels: Tensor,
        embed: Embed,
        run_layer: RunLayer,
        cross_entropy: CrossEntropy,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """`losses` unchanged, with the gradients of the depths' losses attached.

        Args:
            losses: the main loss of each token (batch, seq), or their sum.
            hidden: the normed hidden states (batch, seq, hidden) from which the main loss is computed.
            labels: (batch, seq), the targets of the main loss; -100 is ignored.
            document_ids: for packed sequences; no depth predicts a token of another document.
        """
        reduction: Literal["none", "sum"] = "none" if losses.ndim else "sum"
        found = []
        for depth, module in enumerate(self.depths, start=1):
            hidden = module(hidden, embed(depth), run_layer)
            targets = shifted(labels, depth, fill=IGNORE_INDEX)
            if document_ids is not None:
                is_other = shifted(document_ids, depth, fill=-1) != document_ids
                targets = targets.masked_fill(is_other, IGNORE_INDEX)
            loss = cross_entropy(hidden, targets, reduction)
            found.append((loss.detach().sum(), targets.ne(IGNORE_INDEX).sum()))
            losses = with_token_losses(losses, loss, self._weight)
        if self.step.counts and not (self.step.is_replay or is_recomputing()):
            if self.record is None or self.record.device != losses.device:
                self.record = torch.zeros(len(found), 2, dtype=count_dtype(losses.device), device=losses.device)
            dtype = self.record.dtype
            self.record.add_(torch.stack([one.to(dtype) for pair in found for one in pair]).view(-1, 2))
        return losses


def shifted(x: Tensor, places: int, fill: int) -> Tensor:
    """`x` (batch, seq) shifted left by `places`, with `fill` at the end."""
    return pad(x[:, places:], (0, min(places, x.shape[1])), value=fill)
