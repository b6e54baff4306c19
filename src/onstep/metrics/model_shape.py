"""The sizes of a transformer that FLOPs and memory follow from, read from its configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onstep.errors import ConfigError

_FFN_MULTIPLE = 64


@dataclass(frozen=True)
class ModelShape:
    """Sizes in elements; the letters of the formulas in brackets."""

    num_layers: int
    """Decoder layers, without those of multi-token prediction."""
    hidden_size: int
    """[h]"""
    ffn_hidden_size: int
    """[f]"""
    num_attention_heads: int
    num_query_groups: int
    """Key/value heads [g]."""
    kv_channels: int
    """Width of a head [d]."""
    vocab_size: int
    """Rows of the embedding, padded [V]."""
    seq_length: int
    """[s]"""
    num_projections: int = 3
    """Matrices of a feed-forward block: 3 where it is gated, else 2 [p]."""
    ties_embeddings: bool = False
    has_output_gate: bool = False
    qkv_bias: bool = False
    linear_bias: bool = False
    """Biases of the attention output and of the feed-forward matrices."""
    norm_bias: bool = False
    """LayerNorm, with a bias beside its scale."""
    qk_norm: bool = False
    """A norm of each head's query and key, shared by the heads."""
    num_positions: int = 0
    """Rows of a learned table of positions; 0 is none."""
    moe_layers: tuple[bool, ...] = ()
    """For each layer, multi-token prediction last, whether it is a mixture of experts; empty is none."""
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    """[fm]"""
    moe_topk: int = 0
    """Experts of a token [k]."""
    shared_expert_size: int = 0
    """[fs]"""
    shared_expert_gate: bool = False
    mtp_depth: int = 0
    """Depth of multi-token prediction [M]."""

    @property
    def query_width(self) -> int:
        """Elements of all query heads [q]."""
        return self.num_attention_heads * self.kv_channels

    @property
    def all_layers(self) -> int:
        """Layers with those of multi-token prediction [L]."""
        return self.num_layers + self.mtp_depth

    @property
    def key_width(self) -> int:
        """Elements of all key heads, and of all value heads."""
        return self.num_query_groups * self.kv_channels

    @property
    def num_dense_layers(self) -> int:
        """[Ld]"""
        return self.all_layers - self.num_moe_layers

    @property
    def num_moe_layers(self) -> int:
        """[Lm]"""
        return sum(self.moe_layers)

    @classmethod
    def of(cls, model: Any, seq_length: int | None = None) -> ModelShape | None:
        """The shape of a configuration with Megatron's field names; None where no formula is known for it.

        Those are models without attention heads, hybrid ones and those with multi-head latent attention.

        Args:
            model: a `ModelConfig`, or any object with its fields. Fields of mixture of experts, of multi-token
                prediction and `gated_linear_unit` are read where it has them; without the last it is gated (SwiGLU).
            seq_length: tokens of a sequence, where they are not the configuration's.

        Raises:
            ConfigError: without a size of the vocabulary.
        """
        if not _has_known_attention(model):
            return None
        hidden, heads = model.hidden_size, model.num_attention_heads
        depth = _whole(model, "mtp_num_layers")
        is_moe = bool(_whole(model, "num_moe_experts"))
        is_gated = bool(getattr(model, "gated_linear_unit", True))
        ffn = getattr(model, "ffn_hidden_size", None) or _default_ffn(hidden, is_gated)
        learns_positions = getattr(model, "position_embedding_type", "rope") == "learned_absolute"
        length = model.seq_length if seq_length is None else seq_length
        return cls(
            num_layers=model.num_layers,
            hidden_size=hidden,
            ffn_hidden_size=ffn,
            num_attention_heads=heads,
            num_query_groups=getattr(model, "num_query_groups", None) or heads,
            kv_channels=getattr(model, "kv_channels", None) or hidden // heads,
            vocab_size=_vocabulary(model),
            seq_length=length,
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


def _default_ffn(hidden: int, is_gated: bool) -> int:
    """The width that a configuration leaves open, as `onstep.models.sizes` has it."""
    return math.ceil(8 * hidden / (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE if is_gated else 4 * hidden


def _has_known_attention(model: Any) -> bool:
    is_other_kind = getattr(model, "multi_latent_attention", False) or getattr(model, "is_hybrid_model", False)
    return getattr(model, "num_attention_heads", None) is not None and not is_other_kind


def _whole(model: Any, name: str) -> int:
    return getattr(model, name, None) or 0


def _vocabulary(model: Any) -> int:
    """Rows of the embedding: a multiple of `make_vocab_size_divisible_by` times the tensor-parallel size."""
    if model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is None, and FLOPs and memory depend on it; set it to the tokenizer's vocabulary size."
        )
    parts = getattr(model, "tensor_model_parallel_size", None) or 1
    multiple = (getattr(model, "make_vocab_size_divisible_by", None) or 1) * parts
    return -(-int(model.vocab_size) // multiple) * multiple


def _moe_layers(model: Any, mtp_depth: int) -> tuple[bool, ...]:
    """`moe_layer_freq`: every n-th layer from the first on, or a list of 0 and 1; further layers as the last one."""
    frequency = getattr(model, "moe_layer_freq", None) or 1
    if isinstance(frequency, int):
        pattern = [index % frequency == 0 for index in range(model.num_layers)]
    else:
        pattern = [bool(one) for one in frequency]
        if len(pattern) != model.num_layers:
            raise ConfigError(
                f"model.moe_layer_freq has {len(pattern)} entries and the model {model.num_layers} layers; "
                f"give one entry for each layer, or a whole number."
            )
    return (*pattern, *[pattern[-1]] * mtp_depth)
