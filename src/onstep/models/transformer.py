"""Implements a decoder-only transformer: a Llama by default; its options also give GPT-2, Qwen2 and Qwen3."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from onstep.config import ModelConfig
from onstep.distributed.gathered_inputs import product
from onstep.distributed.shards import local_weight
from onstep.errors import ConfigError
from onstep.models.fused_loss import fused_cross_entropy, is_plain_head
from onstep.models.heads import LinearForLastLayer
from onstep.models.initial_weights import init_weights
from onstep.models.layers.autocast import product_dtype
from onstep.models.layers.layer import Attention, Layer, build_norm
from onstep.models.layers.rotary import RotaryTables
from onstep.models.layers.sequence_context import (
    KeyValueCache,
    SequenceContext,
    chosen_positions,
    learned_positions,
    sequence_context,
)
from onstep.models.multi_token_prediction import IGNORE_INDEX, MultiTokenPrediction, shifted
from onstep.models.offloading import offloading
from onstep.models.quantized_layers import num_weights
from onstep.models.recomputation import is_recomputed, recomputed
from onstep.models.sizes import check_model_config, head_width, vocabulary_size
from onstep.models.vocabulary_loss import (
    LARGE_VOCABULARY,
    Reduction,
    cross_entropy_in_chunks,
    linear_cross_entropy,
    tokens_of_chunk,
)
from onstep.models.vocabulary_share import VocabularyShare, cross_entropy_of_share


class Transformer(nn.Module):
    """The model of a `ModelConfig`, with weights drawn as in `init_weights` from torch's global RNG.

    `config` is copied: later changes to the one passed in do not affect the model. With tied embeddings there is no
    `output` module; the embedding matrix is used instead. The output head can be replaced (see
    `create_value_head_hook`) under the name `output` or, as in Megatron's models, `output_layer`.

    Args:
        config: the section `model` of a configuration.

    Raises:
        ConfigError: for inconsistent sizes, or if `vocab_size` is missing.
    """

    def __init__(self, config: ModelConfig) -> None:
        check_model_config(config)
        super().__init__()
        config = self.config = copy.deepcopy(config)
        vocabulary = vocabulary_size(config)
        self.embedding = nn.Embedding(vocabulary, config.hidden_size)
        has_table = config.position_embedding_type == "learned_absolute"
        self.position_embedding = nn.Embedding(config.seq_length, config.hidden_size) if has_table else None
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.rotary: RotaryTables | None = None
        if config.position_embedding_type == "rope":
            self.rotary = RotaryTables(head_width(config), config.rotary_base, config.seq_length, config.rope_scaling)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.final_norm = build_norm(config)
        self.mtp: MultiTokenPrediction | None = None
        if config.mtp_num_layers:
            further = range(config.num_layers, config.num_layers + config.mtp_num_layers)
            self.mtp = MultiTokenPrediction(config, [Layer(config, index) for index in further])
        tied = config.share_embeddings_and_output_weights
        self.output: nn.Module | None = None if tied else nn.Linear(config.hidden_size, vocabulary, bias=False)
        self.vocabulary: VocabularyShare | None = None
        """The tokens whose logits this rank computes, where ranks divide them; None if it computes all."""
        init_weights(self, config)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        reduction: Reduction = "none",
        cache: KeyValueCache | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> Tensor:
        """Logits of the next token, or its loss if `labels` are given.

        Args:
            tokens: (batch, seq), int64. A sequence may be longer than `config.seq_length`, except with learned
                positions: positions continue, but the model has not seen them in training.
            labels: (batch, seq), int64; `labels[:, t]` is the target of position t (already shifted), -100 is ignored.
            reduction: "none" returns the loss of every token, "sum" their sum; the caller divides by a count.
            cache: earlier positions, for generation; `tokens` follow them and are appended.
            position_ids: (batch, seq), int64, instead of 0, 1, 2, ...
            document_ids: (batch, seq), int64, for packed sequences: a token attends only to those of its own document,
                so results are as if each document were alone. A document is a run of equal ids. Without `position_ids`,
                positions restart in each.
            cu_seqlens: (documents + 1,), int32: the same boundaries as cumulative lengths in the flattened batch, which
                a GPU uses instead of a mask. It may end in repetitions of the last one.
            max_seqlen: at least the length of the longest document; None means that of a sequence.

        Returns:
            Without labels, logits (batch, seq, vocab) in the dtype of the computation, or the output of a replaced
            head. With labels, cross-entropy in nats, float32: (batch, seq) with 0 where ignored, or () for "sum".

        Raises:
            ConfigError: for positions beyond a learned table (`position_ids` on a GPU are not checked; CUDA reports an
                error instead), labels with a value head, missing labels for multi-token prediction in training,
                documents together with a cache, either beyond `config.seq_length` with dynamic rope scaling, or
                `cu_seqlens` without documents.
        """
        self._check_labels(labels)
        position_ids = chosen_positions(position_ids, document_ids)
        context = self._context(tokens, cache, position_ids, document_ids, cu_seqlens, max_seqlen)
        hidden = self._hidden_states(tokens, position_ids, context)
        if labels is None:
            return self.logits(hidden)
        losses = self.cross_entropy(hidden, labels, reduction)
        if self.mtp is None or not self.training or not torch.is_grad_enabled():
            return losses
        if cache is not None:  # whose keys are not those of the further depths
            context = self._context(tokens, None, position_ids, document_ids)
        return self.mtp.attach(
            losses,
            hidden,
            labels,
            embed=lambda depth: self._embedded_later(tokens, position_ids, depth),
            run_layer=lambda layer, x: self._run_layer(layer, x, context),
            cross_entropy=self.cross_entropy,
            document_ids=None if context.documents is None else context.documents.first,
        )

    def hidden_states(
        self,
        tokens: Tensor,
        cache: KeyValueCache | None = None,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """The normed final residual stream, (batch, seq, hidden), the input of `logits`.

        Args:
            tokens: ids of tokens, (batch, seq).
            cache: keys and values of earlier positions, which these are appended to; None for none.
            position_ids: positions, (batch, seq); None for 0, 1, 2, ...
            document_ids: the document of each position, (batch, seq); attention stays within one. None for a single
                one.
        """
        position_ids = chosen_positions(position_ids, document_ids)
        context = self._context(tokens, cache, position_ids, document_ids)
        return self._hidden_states(tokens, position_ids, context)

    def _context(self, tokens: Tensor, *rest: Any) -> SequenceContext:
        return sequence_context(self.rotary, tokens, *rest, dtype=self.embedding.weight.dtype)

    def _hidden_states(self, tokens: Tensor, position_ids: Tensor | None, context: SequenceContext) -> Tensor:
        x = self._embedded(tokens, context.cache, position_ids)
        with offloading(self, self.config):
            for index, layer in enumerate(self.layers):
                x = self._run_layer(layer, x, context, index)
        if context.cache is not None:
            context.cache.advance(tokens.shape[1])
        normed: Tensor = self.final_norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of all tokens in the vocabulary, (..., hidden) to (..., vocab), or the values of a replaced head.

        Args:
            hidden: hidden states, (..., hidden).
        """
        if self.vocabulary is None:
            return self._logits(hidden)
        return self.vocabulary.joined(self._logits(self.vocabulary.enter(hidden)))

    def _logits(self, hidden: Tensor) -> Tensor:
        """Those of this rank's part of the vocabulary."""
        if self.output is None:
            return product(hidden, local_weight(self.embedding.weight))
        scores = self.output(hidden)
        values: Tensor = scores[0] if isinstance(scores, tuple) else scores
        return values

    def cross_entropy(self, hidden: Tensor, labels: Tensor, reduction: Reduction) -> Tensor:
        """The loss of hidden states (batch, seq, hidden), as `forward` returns it; see `model.chunked_loss`.

        Args:
            hidden: hidden states, (batch, seq, hidden).
            labels: ids of the next tokens, (batch, seq); -100 has no loss.
            reduction: `mean`, `sum` or `none`.
        """
        size, share = self._chunk_of_loss(labels), self.vocabulary
        hidden = hidden if share is None else share.enter(hidden)
        head = self.embedding if self.output is None else self.output
        if self.config.fused_linear_loss and reduction == "sum" and is_plain_head(head):
            x = hidden.flatten(0, 1)
            losses = fused_cross_entropy(x.to(product_dtype(x)), head.weight, labels.flatten())
        elif size is None and share is not None:
            losses = cross_entropy_of_share(self._logits(hidden).float().flatten(0, 1), labels.flatten(), share)
            losses = losses if reduction == "none" else losses.sum()
        elif size is None:
            scores = self._logits(hidden).float().flatten(0, 1)
            losses = cross_entropy(scores, labels.flatten(), ignore_index=IGNORE_INDEX, reduction=reduction)
        elif is_plain_head(head):
            weight = local_weight(head.weight)
            losses = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=size, share=share).float()
        else:
            x, targets = hidden.flatten(0, 1), labels.flatten()
            losses = cross_entropy_in_chunks(self._logits, x, targets, reduction=reduction, chunk=size, share=share)
        return losses.view_as(labels) if reduction == "none" else losses

    @property
    def output_layer(self) -> nn.Module | None:
        """`output` under Megatron's name."""
        return self.output

    def __setattr__(self, name: str, value: Any) -> None:
        # torch registers a module before it considers properties, so a setter would never be called
        super().__setattr__("output" if name == "output_layer" else name, value)

    @property
    def has_value_head(self) -> bool:
        """Whether the head has been replaced by one that predicts values rather than tokens."""
        return isinstance(self.output, LinearForLastLayer)

    @property
    def max_attention_logit(self) -> Tensor | None:
        """The largest attention logit of the last forward pass without a cache, over all layers; () on the device.

        A logit is the product of a query and a key it attends to, divided by the square root of the head size, before
        the softmax. None if `log_max_attention_logit` is off, and before the first pass. Covers only this rank's batch.
        """
        found = [one.largest_logit for one in self.modules() if isinstance(one, Attention)]
        known = [one for one in found if one is not None]
        return torch.stack(known).amax() if known else None

    def num_parameters(self, trainable_only: bool = False, exclude_embeddings: bool = False) -> int:
        """Number of parameters, shared ones counted once.

        Args:
            trainable_only: count only those with `requires_grad`.
            exclude_embeddings: exclude the embedding matrix (and thus the output matrix if the two are tied) and
                learned positions.
        """
        embeddings = {id(one.weight) for one in (self.embedding, self.position_embedding) if one is not None}
        return sum(
            num_weights(parameter)
            for parameter in self.parameters()
            if (parameter.requires_grad or not trainable_only)
            and not (exclude_embeddings and id(parameter) in embeddings)
        )

    def _run_layer(self, layer: nn.Module, x: Tensor, context: SequenceContext, index: int = 0) -> Tensor:
        if is_recomputed(self.config, index) and context.cache is None and torch.is_grad_enabled():
            return recomputed(layer, self.config, x, context)
        out: Tensor = layer(x, context)
        return out

    def _chunk_of_loss(self, labels: Tensor) -> int | None:
        """Number of tokens whose logits exist at once; None for all.

        Hooks of the head, such as those that gather sharded weights, see whole outputs.
        """
        head = self.embedding if self.output is None else self.output
        vocabulary, option = vocabulary_size(self.config), self.config.chunked_loss
        size = tokens_of_chunk(vocabulary, is_trained=any(one.requires_grad for one in head.parameters()))
        is_wanted = vocabulary >= LARGE_VOCABULARY if option is None else option
        is_hooked = self.output is not None and bool(self.output._forward_hooks or self.output._forward_pre_hooks)
        return size if is_wanted and labels.numel() > size and not is_hooked else None

    def _check_labels(self, labels: Tensor | None) -> None:
        if labels is not None and self.has_value_head:
            raise ConfigError(
                "the model ends in a value head, for which there is no cross-entropy with labels; call it without "
                "labels and compute the loss from the values in your forward step."
            )
        further = [] if self.mtp is None else [one for one in self.mtp.parameters() if one.requires_grad]
        if labels is None and further and self.training and torch.is_grad_enabled():
            raise ConfigError(
                f"the losses of model.mtp_num_layers={self.config.mtp_num_layers} require labels, and the model was "
                "called without labels in training; pass labels, or set model.mtp_num_layers to null to use your own "
                "loss."
            )

    def _embedded_later(self, tokens: Tensor, position_ids: Tensor | None, depth: int) -> Tensor:
        """The embeddings of the tokens `depth` positions later, at their own positions; those of token 0 at the end."""
        if position_ids is None and self.position_embedding is not None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        later = None if position_ids is None else shifted(position_ids, depth, fill=0)
        return self._embedded(shifted(tokens, depth, fill=0), None, later)

    def _embedded(self, tokens: Tensor, cache: KeyValueCache | None, position_ids: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            start = 0 if cache is None else cache.length
            x = x + learned_positions(self.position_embedding, start, tokens.shape[1], position_ids)
        embedded: Tensor = self.dropout(x)
        return embedded


def empty_transformer(config: ModelConfig, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Transformer:
    """A model with uninitialized weights of a type, on the CPU or on `meta`, for a caller that fills them all.

    Raises:
        ConfigError: as for `Transformer`.
    """
    with torch.device("meta"):
        model = Transformer(config)
    model = model.to(dtype)
    return model if device == "meta" else model.to_empty(device=device)


def build_transformer(config: ModelConfig, seed: int | None = None, dtype: torch.dtype = torch.float32) -> Transformer:
    """A new model on the CPU, with weights of a type, drawn as in `init_weights`.

    Args:
        seed: determines the weights, which are the same on every rank and device; torch's global RNG is not changed.
            None draws from the global RNG.
        config: the section `model` of a configuration.

    Raises:
        ConfigError: as for `Transformer`.
    """
    model = empty_transformer(config, dtype)
    generator = None if seed is None else torch.Generator(device="cpu").manual_seed(seed)
    init_weights(model, model.config, generator)
    return model
