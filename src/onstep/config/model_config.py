"""The parts of a configuration that say what the model is."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.part import ConfigPart


@dataclass
class ModelConfig(ConfigPart):
    """A decoder-only transformer of the Llama/Qwen2 family. Sizes are in elements."""

    num_layers: int = 4
    """Transformer layers."""
    hidden_size: int = 128
    """Width of the residual stream."""
    ffn_hidden_size: int | None = None
    """Width of the SwiGLU; None is 8/3 of `hidden_size`, rounded up to a multiple of 64."""
    num_attention_heads: int = 4
    """Query heads of a layer."""
    num_query_groups: int | None = None
    """Key/value heads; None is one for each attention head."""
    kv_channels: int | None = None
    """Width of a head; None is `hidden_size / num_attention_heads`."""
    vocab_size: int | None = None
    """None takes the tokenizer's, rounded up to a multiple of `make_vocab_size_divisible_by`."""
    make_vocab_size_divisible_by: int = 1
    """The vocabulary is padded to a multiple of this."""
    seq_length: int = 256
    """Tokens of a training sequence; the same as `dataset.seq_length`."""
    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    layernorm_epsilon: float = 1e-5
    """Added under the root of RMSNorm."""
    add_qkv_bias: bool = False
    """Bias of the query, key and value projections (Qwen2)."""
    share_embeddings_and_output_weights: bool = False
    """One matrix for embedding and output."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights."""
    attention_dropout: float = 0.0
    """Dropout of attention weights."""
    hidden_dropout: float = 0.0
    """Dropout of the residual branches."""
