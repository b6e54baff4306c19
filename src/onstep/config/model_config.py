"""The parts of a configuration that say what the model is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.config.part import INCOMPATIBLE, SAFE, TRAJECTORY, ConfigPart, option


@dataclass
class ModelConfig(ConfigPart):
    """A decoder-only transformer: by default of the Llama family; the options make it a GPT-2, a Qwen2, a Qwen3 or one
    with mixtures of experts. Sizes are in elements."""

    num_layers: int = option(4, INCOMPATIBLE, bound="> 0")
    """Transformer layers."""
    hidden_size: int = option(128, INCOMPATIBLE, bound="> 0")
    """Width of the residual stream."""
    ffn_hidden_size: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Width of the feed-forward block; None is 8/3 of `hidden_size`, rounded up to a multiple of 64, where it is gated,
    else 4 times `hidden_size`."""
    num_attention_heads: int = option(4, INCOMPATIBLE, bound="> 0")
    """Query heads of a layer."""
    num_query_groups: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Key/value heads; None is one for each attention head."""
    kv_channels: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Width of a head; None is `hidden_size / num_attention_heads`."""
    vocab_size: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """None takes the tokenizer's, rounded up to a multiple of `make_vocab_size_divisible_by`."""
    make_vocab_size_divisible_by: int = option(1, INCOMPATIBLE, bound="> 0")
    """The vocabulary is padded to a multiple of this."""
    seq_length: int = option(256, TRAJECTORY, bound="> 0")
    """Tokens of a training sequence; the same as `dataset.seq_length`."""
    rotary_base: float = option(10000.0, TRAJECTORY, bound="> 0")
    """Base of the rotary frequencies."""
    layernorm_epsilon: float = option(1e-5, TRAJECTORY, bound="> 0")
    """Added under the root of the norms."""
    add_qkv_bias: bool = option(False, INCOMPATIBLE)
    """Bias of the query, key and value projections (Qwen2)."""
    share_embeddings_and_output_weights: bool = option(False, INCOMPATIBLE)
    """One matrix for embedding and output."""
    init_method_std: float = option(0.02, TRAJECTORY, bound="> 0")
    """Standard deviation of initial weights."""
    attention_dropout: float = option(0.0, TRAJECTORY, bound="at least 0 and below 1")
    """Dropout of attention weights."""
    hidden_dropout: float = option(0.0, TRAJECTORY, bound="at least 0 and below 1")
    """Dropout of the residual branches."""
    normalization: str = option("RMSNorm", INCOMPATIBLE, choices=("RMSNorm", "LayerNorm"))
    """RMSNorm | LayerNorm (with bias)"""
    position_embedding_type: str = option("rope", INCOMPATIBLE, choices=("rope", "learned_absolute", "none"))
    """rope (rotary) | learned_absolute (a table of `seq_length` rows) | none"""
    rope_scaling: dict[str, Any] | None = option(None, TRAJECTORY)
    """Stretched rotary positions, in Hugging Face's form: {rope_type: linear, factor: 2.0}; or llama3, yarn (both with
    original_max_position_embeddings), or dynamic, which acts on sequences longer than `seq_length`."""
    gated_linear_unit: bool = option(True, INCOMPATIBLE)
    """A third matrix gates the feed-forward block (SwiGLU with silu)."""
    activation_func: str = option("silu", INCOMPATIBLE, choices=("silu", "gelu", "gelu_tanh", "relu", "relu2"))
    """silu | gelu | gelu_tanh | relu | relu2 (squared)"""
    add_bias_linear: bool = option(False, INCOMPATIBLE)
    """Biases of the attention output and of the feed-forward matrices."""
    qk_layernorm: bool = option(False, INCOMPATIBLE)
    """Norm of each head's query and key, before the rotation (Qwen3)."""
    recompute_granularity: str | None = option(None, SAFE, choices=("full",))
    """full recomputes each layer in the backward pass (activation checkpointing); None keeps its activations."""
    log_max_attention_logit: bool = option(False, SAFE)
    """Report the largest attention logit of each step; costs a second product of queries and keys."""
    num_moe_experts: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Experts of a mixture-of-experts layer; None is a dense model."""
    moe_layer_freq: int | list[int] = option(1, INCOMPATIBLE)
    """Which layers have experts: every n-th from the first on, or a 0 or 1 for each layer."""
    moe_ffn_hidden_size: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Width of an expert; None is `ffn_hidden_size`."""
    moe_router_topk: int = option(2, TRAJECTORY, bound="> 0")
    """Experts that a token goes to."""
    moe_router_score_function: str = option("softmax", TRAJECTORY, choices=("softmax", "sigmoid"))
    """softmax | sigmoid"""
    moe_router_pre_softmax: bool = option(False, TRAJECTORY)
    """Softmax over all experts, and the chosen ones keep their shares; False: over the chosen ones, which sum to 1."""
    moe_router_topk_scaling_factor: float | None = option(None, TRAJECTORY)
    """Multiplies the weights of the chosen experts."""
    moe_router_load_balancing_type: str | list[str] = option("aux_loss", TRAJECTORY)
    """aux_loss (of each micro-batch) | seq_aux_loss (of each sequence) | global_aux_loss (of the step so far, over all
    ranks) | none; several in a list."""
    moe_aux_loss_coeff: float | list[float] = option(0.0, TRAJECTORY)
    """Weight of the load-balancing loss; one for each where there are several."""
    moe_z_loss_coeff: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Weight of the z loss, which keeps router logits small."""
    moe_router_enable_expert_bias: bool = option(False, INCOMPATIBLE)
    """A bias for choosing experts, moved towards even load after each step instead of by a loss."""
    moe_router_bias_update_rate: float = option(1e-3, TRAJECTORY, bound=">= 0")
    """How far that bias moves at a step."""
    moe_shared_expert_intermediate_size: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Width of the expert that every token goes to; None has none."""
    moe_shared_expert_gate: bool = option(False, INCOMPATIBLE)
    """A learned gate in front of the shared expert."""
    moe_expert_capacity_factor: float | None = option(None, TRAJECTORY, bound="> 0")
    """Tokens that an expert takes in training, as a multiple of an even share; the rest is dropped. None drops nothing;
    nor do evaluation and generation."""
    moe_token_drop_policy: str = option("probs", TRAJECTORY, choices=("probs", "position"))
    """Which tokens an overfull expert drops: probs (the least wanted) | position (the last)."""
    moe_grouped_gemm: bool = option(True, SAFE)
    """All experts in one grouped matrix product, where torch has it for the device and type."""
    moe_per_layer_logging: bool = option(False, SAFE)
    """Report the router's losses of each layer too, as `moe/<name>_layer_<index>`; loads come from `RouterMonitor`."""
    mtp_num_layers: int | None = option(None, INCOMPATIBLE, bound="> 0")
    """Depths of multi-token prediction: further layers that predict the tokens after the next."""
    mtp_loss_scaling_factor: float = option(0.1, TRAJECTORY, bound=">= 0")
    """Weight of the mean loss of multi-token prediction."""
