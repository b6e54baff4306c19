"""Derives from a configuration the sizes that determine a transformer's FLOPs and memory, and counts its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onstep.config.checks.model import LORA_PROJECTIONS
from onstep.config.sections.model import ModelConfig, default_ffn_hidden_size
from onstep.errors import ConfigError


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements, with the symbols used in formulas in brackets."""

    num_layers: int
    """Number of decoder layers, excluding those of multi-token prediction."""
    hidden_size: int
    """[h]"""
    ffn_hidden_size: int
    """[f]"""
    num_attention_heads: int
    """The number of query heads."""
    num_query_groups: int
    """Number of key/value heads [g]."""
    kv_channels: int
    """Size of a head [d]."""
    vocab_size: int
    """Number of rows of the embedding, padded [V]."""
    seq_length: int
    """[s]"""
    num_projections: int = 3
    """Number of matrices in a feed-forward block: 3 if gated, else 2 [p]."""
    ties_embeddings: bool = False
    """Whether input and output embeddings are one matrix."""
    has_output_gate: bool = False
    """Whether attention has an output gate."""
    qkv_bias: bool = False
    """Whether query, key and value have biases."""
    linear_bias: bool = False
    """Whether the attention output and the feed-forward matrices have biases."""
    norm_bias: bool = False
    """Whether norms have a bias as well as a scale (LayerNorm)."""
    qk_norm: bool = False
    """Whether each head's query and key are normalized, with weights shared by the heads."""
    num_positions: int = 0
    """Number of rows of a learned position table; 0 for none."""
    moe_layers: tuple[bool, ...] = ()
    """Whether each layer is a mixture of experts, those of multi-token prediction last; empty if none is."""
    num_experts: int = 0
    """Experts of a layer; 0 for a dense one."""
    moe_ffn_hidden_size: int = 0
    """[fm]"""
    moe_topk: int = 0
    """Number of experts per token [k]."""
    shared_expert_size: int = 0
    """[fs]"""
    shared_expert_gate: bool = False
    """Whether the shared expert has a gate."""
    mtp_depth: int = 0
    """Depth of multi-token prediction [M]."""
    sequence_parts: int = 1
    """Number of ranks that divide the activations between matrices by positions."""
    has_embedding: bool = True
    """Whether tokens are embedded; not by stages of a pipeline after the first."""
    has_head: bool = True
    """Whether there are the last norm and the output; not on stages of a pipeline before the last."""

    @property
    def query_width(self) -> int:
        """Total size of all query heads [q]."""
        return self.num_attention_heads * self.kv_channels

    @property
    def all_layers(self) -> int:
        """Number of layers including those of multi-token prediction [L]."""
        return self.num_layers + self.mtp_depth

    @property
    def key_width(self) -> int:
        """Total size of all key heads, which equals that of all value heads."""
        return self.num_query_groups * self.kv_channels

    @property
    def num_dense_layers(self) -> int:
        """[Ld]"""
        return self.all_layers - self.num_moe_layers

    @property
    def num_moe_layers(self) -> int:
        """[Lm]"""
        return sum(self.moe_layers)

    @property
    def attention_matrices(self) -> int:
        """Number of weights in the matrices of one layer's attention."""
        gate = self.query_width if self.has_output_gate else 0
        return self.hidden_size * (2 * self.query_width + 2 * self.key_width + gate)

    @property
    def joining_matrices(self) -> int:
        """Number of weights that combine embedding and hidden state in multi-token prediction."""
        return self.mtp_depth * 2 * self.hidden_size**2

    def block_matrices(self, width: int) -> int:
        """Number of weights in the matrices of a feed-forward block of this width.

        Args:
            width: the width of the block in elements.
        """
        return self.num_projections * self.hidden_size * width

    def of_rank(self, ranks: int, *, divides_sequences: bool = False) -> ModelShape:
        """The shape of what the first of some tensor-parallel ranks has.

        Args:
            ranks: their number.
            divides_sequences: whether they are sequence-parallel.
        """
        return replace(
            self,
            num_attention_heads=self.num_attention_heads // ranks,
            num_query_groups=max(1, self.num_query_groups // ranks),
            ffn_hidden_size=self.ffn_hidden_size // ranks,
            moe_ffn_hidden_size=self.moe_ffn_hidden_size // ranks,
            shared_expert_size=self.shared_expert_size // ranks,
            vocab_size=-(-self.vocab_size // ranks),
            sequence_parts=ranks if divides_sequences else 1,
        )

    def of_stages(self, layers: Sequence[int], *, has_embedding: bool, has_head: bool) -> ModelShape:
        """The shape of what a rank of a pipeline has.

        Args:
            layers: the numbers of its layers.
            has_embedding: whether the first stage is among its own.
            has_head: whether the last one is.
        """
        depth = self.mtp_depth if has_head else 0  # predicts from embeddings, of which the last stage has a copy
        own = [*layers, *range(self.num_layers, self.num_layers + depth)]
        return replace(
            self,
            num_layers=len(layers),
            mtp_depth=depth,
            moe_layers=tuple(self.moe_layers[index] for index in own) if self.moe_layers else (),
            has_embedding=has_embedding or depth > 0,
            has_head=has_head,
        )

    @classmethod
    def of(cls, model: Any, seq_length: int | None = None) -> ModelShape | None:
        """The shape of a configuration with Megatron's field names; None if no formula is known for it.

        That is the case for models without attention heads, hybrid models, multi-head latent attention, and classes of
        `transformers` (`hf_config`).

        Args:
            model: a `ModelConfig`, or any object with its fields. Fields for mixtures of experts, multi-token
                prediction and `gated_linear_unit` are optional; without the last, the model counts as gated (SwiGLU).
            seq_length: tokens per sequence, if different from the configuration.

        Raises:
            ConfigError: if the vocabulary size is missing.
        """
        heads = getattr(model, "num_attention_heads", None)
        is_other_kind = getattr(model, "multi_latent_attention", False) or getattr(model, "is_hybrid_model", False)
        if heads is None or is_other_kind or getattr(model, "hf_config", None) is not None:
            return None
        hidden, depth = model.hidden_size, _whole(model, "mtp_num_layers")
        is_moe = bool(_whole(model, "num_moe_experts"))
        is_gated = bool(getattr(model, "gated_linear_unit", True))
        ffn = getattr(model, "ffn_hidden_size", None) or default_ffn_hidden_size(hidden, is_gated)
        learns_positions = getattr(model, "position_embedding_type", "rope") == "learned_absolute"
        return cls(
            num_layers=model.num_layers,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            num_query_groups=getattr(model, "num_query_groups", None) or heads,
            kv_channels=getattr(model, "kv_channels", None) or hidden // heads,
            vocab_size=_vocabulary(model),
            seq_length=model.seq_length if seq_length is None else seq_length,
            num_projections=3 if is_gated else 2,
            ties_embeddings=bool(getattr(model, "share_embeddings_and_output_weights", False)),
            has_output_gate=bool(getattr(model, "attention_output_gate", False)),
            qkv_bias=bool(getattr(model, "add_qkv_bias", False)),
            linear_bias=bool(getattr(model, "add_bias_linear", False)),
            norm_bias=getattr(model, "normalization", "RMSNorm") == "LayerNorm",
            qk_norm=bool(getattr(model, "qk_layernorm", False)),
            num_positions=model.seq_length if learns_positions else 0,
            moe_layers=_moe_layers(model, depth) if is_moe else (),
            num_experts=_whole(model, "num_moe_experts"),
            moe_ffn_hidden_size=_whole(model, "moe_ffn_hidden_size") or ffn,
            moe_topk=_whole(model, "moe_router_topk") or 1,
            shared_expert_size=_whole(model, "moe_shared_expert_intermediate_size"),
            shared_expert_gate=bool(getattr(model, "moe_shared_expert_gate", False)),
            mtp_depth=depth,
        )


def _whole(model: Any, name: str) -> int:
    return getattr(model, name, None) or 0


def _vocabulary(model: Any) -> int:
    """Number of rows of the embedding: a multiple of `make_vocab_size_divisible_by` times the tensor-parallel size."""
    if model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is None, but FLOPs and memory depend on it; set it to the tokenizer's vocabulary size."
        )
    is_own = isinstance(model, ModelConfig)  # whose vocabulary is divided as it is
    parts = 1 if is_own else getattr(model, "tensor_model_parallel_size", None) or 1
    multiple = (getattr(model, "make_vocab_size_divisible_by", None) or 1) * parts
    return -(-int(model.vocab_size) // multiple) * multiple


def _moe_layers(model: Any, mtp_depth: int) -> tuple[bool, ...]:
    """Expand `moe_layer_freq`: every n-th layer starting with the first, or a list of 0 and 1, extended by its last."""
    frequency = getattr(model, "moe_layer_freq", None) or 1
    if isinstance(frequency, int):
        pattern = [index % frequency == 0 for index in range(model.num_layers)]
    else:
        pattern = [bool(one) for one in frequency]
        if len(pattern) != model.num_layers:
            raise ConfigError(
                f"model.moe_layer_freq has {len(pattern)} entries, but the model has {model.num_layers} layers; "
                f"give one entry per layer, or an integer."
            )
    return (*pattern, *[pattern[-1]] * mtp_depth)


def num_parameters(shape: ModelShape) -> int:
    """Number of parameters of a model of this shape; exact for the built-in transformer."""
    layers = shape.all_layers * (_attention(shape) + 2 * _norm(shape))
    layers += shape.num_dense_layers * _feed_forward(shape, shape.ffn_hidden_size)
    layers += shape.num_moe_layers * _experts(shape)
    # embedding, positions, final norm and output; the joining matrices of multi-token prediction
    ends = shape.has_embedding + shape.has_head
    vocabulary = shape.hidden_size * shape.vocab_size * (min(1, ends) if shape.ties_embeddings else ends)
    positions = shape.hidden_size * shape.num_positions * shape.has_embedding
    joining = shape.joining_matrices + shape.mtp_depth * 3 * _norm(shape)
    return layers + vocabulary + positions + _norm(shape) * shape.has_head + joining


def num_active_parameters(shape: ModelShape) -> int:
    """Number of parameters used for a token: all except those of experts it is not routed to."""
    unused = shape.num_experts - shape.moe_topk if shape.num_moe_layers else 0
    return num_parameters(shape) - shape.num_moe_layers * unused * _feed_forward(shape, shape.moe_ffn_hidden_size)


def num_layer_matrix_parameters(shape: ModelShape) -> int:
    """Number of weights in matrices between embedding and output, except stacked experts: those that Muon optimizes."""
    moe = shape.block_matrices(shape.shared_expert_size) + shape.hidden_size * shape.num_experts
    dense = shape.num_dense_layers * shape.block_matrices(shape.ffn_hidden_size)
    return shape.all_layers * shape.attention_matrices + dense + shape.num_moe_layers * moe + shape.joining_matrices


def num_expert_matrix_parameters(shape: ModelShape) -> int:
    """Number of weights in the matrices of all routed experts."""
    return shape.num_moe_layers * shape.num_experts * shape.block_matrices(shape.moe_ffn_hidden_size)


def num_lora_parameters(shape: ModelShape, dim: int, target_modules: Sequence[str] | None = None) -> int:
    """Number of weights that LoRA of rank `dim` adds: `dim * (inputs + outputs)` for each target matrix.

    In a layer with experts, only attention matrices are targets.
    """
    query, key, block = (shape.hidden_size + n for n in (shape.query_width, shape.key_width, shape.ffn_hidden_size))
    inputs_and_outputs = {
        "attention.query": query,
        "attention.key": key,
        "attention.value": key,
        "attention.output": query,
        "feed_forward.gate": block if shape.num_projections == 3 else 0,
        "feed_forward.up": block,
        "feed_forward.down": block,
    }
    added = 0
    for index in range(shape.num_layers):
        has_experts = bool(shape.moe_layers) and shape.moe_layers[index]
        for ours, size in inputs_and_outputs.items():
            names = (f"layers.{index}.{ours}", f"model.layers.{index}.{LORA_PROJECTIONS[ours]}")
            is_wanted = target_modules is None or any(is_target(name, target_modules) for name in names)
            if is_wanted and not (has_experts and ours.startswith("feed_forward.")):
                added += dim * size
    return added


def is_target(name: str, target_modules: Sequence[str]) -> bool:
    """Whether a module's name is one of `target_modules`, or ends with one after a dot."""
    return any(name == target or name.endswith(f".{target}") for target in target_modules)


def _norm(shape: ModelShape, width: int | None = None) -> int:
    return (2 if shape.norm_bias else 1) * (shape.hidden_size if width is None else width)


def _attention(shape: ModelShape) -> int:
    weights = shape.attention_matrices
    weights += shape.query_width + 2 * shape.key_width if shape.qkv_bias else 0
    weights += shape.hidden_size if shape.linear_bias else 0
    weights += 2 * _norm(shape, shape.kv_channels) if shape.qk_norm else 0
    return weights


def _feed_forward(shape: ModelShape, width: int) -> int:
    """Parameters of a block of `num_projections` matrices, the last of which maps back to the hidden size."""
    biases = (shape.num_projections - 1) * width + shape.hidden_size if shape.linear_bias else 0
    return shape.block_matrices(width) + biases


def _experts(shape: ModelShape) -> int:
    """Parameters of a layer's experts, router, shared expert and its gate."""
    weights = shape.num_experts * (_feed_forward(shape, shape.moe_ffn_hidden_size) + shape.hidden_size)
    if shape.shared_expert_size:
        weights += _feed_forward(shape, shape.shared_expert_size)
        weights += shape.hidden_size if shape.shared_expert_gate else 0
    return weights
