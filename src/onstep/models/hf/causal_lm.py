"""Calls any causal language model of `transformers` like a `Transformer`."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep.config import ModelConfig
from onstep.models.hf.deferred_logits import DeferredLogits, deferring
from onstep.models.multi_token_prediction import IGNORE_INDEX
from onstep.models.offloading import offloading
from onstep.models.quantized_layers import num_weights
from onstep.models.recomputation import recompute_in
from onstep.models.vocabulary_loss import Reduction


class Separation(StrEnum):
    """What a model is given so that packed documents do not see each other."""

    POSITIONS = "positions"
    """Positions that restart at 0, from which `transformers` makes the mask or the boundaries."""
    MASK = "mask"
    """A mask of pairs of positions, as booleans."""
    ADDED_MASK = "added mask"
    """The same as numbers that are added to attention scores."""


class CausalLM(nn.Module):
    """A causal language model of `transformers`, with the calls of `Transformer`.

    Args:
        config: its configuration, with `hf_config`; it is copied.
        model: the `PreTrainedModel`.
    """

    def __init__(self, config: ModelConfig, model: Any) -> None:
        super().__init__()
        self.config = copy.deepcopy(config)
        self.model = model
        self.separation = Separation.POSITIONS
        """How it is called with packed documents."""
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        if config.recompute_granularity is not None:
            recompute_in(model, config)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        reduction: Reduction = "none",
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of the next token, or its loss if `labels` are given.

        The losses of a router (`output_router_logits` in `config.json`) are part of the loss in training, weighted as
        in `transformers`.

        Args:
            tokens: (batch, seq), int64.
            labels: (batch, seq), int64; `labels[:, t]` is the target of position t (already shifted), -100 is ignored.
            reduction: "none" returns the loss of every token, "sum" their sum; the caller divides by a count.
            position_ids: (batch, seq), int64, which restart at 0 in each document of packed sequences.
            document_ids: (batch, seq), int64: a token attends only to its own document, a run of equal ids.

        Returns:
            Without labels, logits (batch, seq, vocab) in the dtype of the computation. With labels, cross-entropy in
            nats, float32: (batch, seq) with 0 where ignored, or () for "sum".
        """
        inputs: dict[str, Any] = {}
        if position_ids is not None and self._takes_positions:
            inputs["position_ids"] = position_ids
        if document_ids is not None and self.separation is not Separation.POSITIONS:
            inputs["attention_mask"] = block_mask(document_ids, is_added=self.separation is Separation.ADDED_MASK)
        defers = nullcontext() if labels is None else deferring(self.model, self.config)
        with offloading(self, self.config), defers:
            output = self.model(input_ids=tokens, use_cache=False, **inputs)
        logits: Tensor = output.logits
        if labels is None:
            return logits
        targets = labels.flatten()
        if isinstance(logits, DeferredLogits):
            losses = logits.cross_entropy(targets, reduction).float()
        else:
            scores = logits.float().flatten(0, 1)
            losses = cross_entropy(scores, targets, ignore_index=IGNORE_INDEX, reduction=reduction)
        of_router = self._loss_of_router(output)
        if of_router is not None:
            counted = targets.ne(IGNORE_INDEX)
            losses = losses + of_router * (counted.sum() if reduction == "sum" else counted)
        return losses.view_as(labels) if reduction == "none" else losses

    def _loss_of_router(self, output: Any) -> Tensor | None:
        loss = getattr(output, "aux_loss", None)
        if not isinstance(loss, Tensor) or not self.training or not torch.is_grad_enabled():
            return None
        return loss * float(getattr(self.model.config.get_text_config(), "router_aux_loss_coef", 0.0))

    def num_parameters(self, trainable_only: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters, shared ones counted once.

        Args:
            trainable_only: count only those with `requires_grad`.
            exclude_embeddings: exclude the embedding matrix (and thus the output matrix if the two are tied).
        """
        embedding = id(self.model.get_input_embeddings().weight)
        return sum(
            num_weights(parameter)
            for parameter in self.parameters()
            if (parameter.requires_grad or not trainable_only)
            and not (exclude_embeddings and id(parameter) == embedding)
        )

    def num_idle_parameters(self) -> int:
        """Number of weights of experts that a token does not use."""
        text = self.model.config.get_text_config()
        experts = next((n for name in _EXPERTS if (n := getattr(text, name, None))), None)
        chosen = next((n for name in _CHOSEN if (n := getattr(text, name, None))), None)
        if not isinstance(experts, int) or not isinstance(chosen, int):
            return 0
        stacked = sum(one.numel() for name, one in self.named_parameters() if ".experts." in name)
        return stacked * max(0, experts - chosen) // experts


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_top_k", "moe_k")


def inner_causal_lm(model: nn.Module) -> CausalLM | None:
    """The `CausalLM` inside wrappers such as DistributedDataParallel; None if there is none."""
    return next((module for module in model.modules() if isinstance(module, CausalLM)), None)


def block_mask(document_ids: Tensor, *, is_added: bool = False) -> Tensor:
    """(batch, 1, seq, seq), bool: True where a query may attend to a key, causally and in its own document.

    Args:
        is_added: float32 instead, with 0 there and the lowest number elsewhere.
    """
    length = document_ids.shape[1]
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    runs = starts.cumsum(dim=1)
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    mask = ((runs[:, :, None] == runs[:, None, :]) & causal).unsqueeze(1)
    if not is_added:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
