"""The model's sizes and options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onstep.config.section import INCOMPATIBLE, INITIAL_ONLY, PATH, SAFE, TRAJECTORY, ConfigSection, option


@dataclass
class ModelConfig(ConfigSection):
    """A decoder-only transformer: by default of the Llama family; the options make it a GPT-2, a Qwen2, a Qwen3 or one
    with mixtures of experts. Sizes are in elements."""

    hf_model: str | None = option(
        None,
        SAFE,
        bound=PATH,
        common=True,
        known_as=("model_name_or_path", "hf_model_id"),
        help="Directory of a Hugging Face model whose `config.json` describes the model, of any family that "
        "`transformers` has; `finetune` starts from its weights, `train` from new ones.",
    )
    hf_config: dict[str, Any] | None = option(
        None,
        INCOMPATIBLE,
        help="That `config.json`, for a family that Onstep does not implement itself: the model is the class of "
        "`transformers`. Filled in from `hf_model` or the pretrained weights.",
    )
    trust_remote_code: bool = option(
        False,
        SAFE,
        needs="model.hf_model",
        help="Run the Python code in the directory `hf_model` that defines the model; false refuses such a model.",
    )
    num_layers: int = option(
        4,
        INCOMPATIBLE,
        bound="> 0 and at most 10,000",
        common=True,
        known_as=("num_hidden_layers", "n_layer", "n_layers"),
        help="Number of transformer layers.",
    )
    hidden_size: int = option(
        128,
        INCOMPATIBLE,
        bound="> 0",
        common=True,
        known_as=("n_embd", "d_model"),
        help="Width of the residual stream.",
    )
    ffn_hidden_size: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        common=True,
        known_as=("intermediate_size",),
        help="Width of the feed-forward block; None is 8/3 of `hidden_size`, rounded up to a multiple of 64, where "
        "it is gated, else 4 times `hidden_size`.",
    )
    num_attention_heads: int = option(
        4,
        INCOMPATIBLE,
        bound="> 0",
        common=True,
        known_as=("n_head", "n_heads", "num_heads"),
        help="Query heads per layer.",
    )
    num_query_groups: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        common=True,
        known_as=("num_key_value_heads",),
        help="Key/value heads per layer; None is one per query head.",
    )
    kv_channels: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        known_as=("head_dim",),
        help="Width of an attention head; None is `hidden_size / num_attention_heads`.",
    )
    vocab_size: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        help="Size of the vocabulary; None is the tokenizer's, rounded up to a multiple of "
        "`make_vocab_size_divisible_by`.",
    )
    make_vocab_size_divisible_by: int = option(
        1, INCOMPATIBLE, bound="> 0", help="Pad the vocabulary to a multiple of this."
    )
    seq_length: int = option(
        256,
        TRAJECTORY,
        bound="> 0",
        common=True,
        known_as=("block_size", "max_seq_length", "max_length", "context_length", "max_position_embeddings"),
        help="Tokens per training sequence, those of `dataset.seq_length`; set either, and the other follows.",
    )
    rotary_base: float = option(
        10000.0,
        TRAJECTORY,
        bound="> 0",
        known_as=("rope_theta",),
        needs="model.position_embedding_type=rope",
        help="Base of the rotary frequencies.",
    )
    layernorm_epsilon: float = option(1e-5, TRAJECTORY, bound="> 0", help="Epsilon of the norms.")
    add_qkv_bias: bool = option(False, INCOMPATIBLE, help="Use biases in the query, key and value projections (Qwen2).")
    share_embeddings_and_output_weights: bool = option(
        False, INCOMPATIBLE, help="Tie the embedding and output matrices."
    )
    init_method_std: float = option(
        0.02, TRAJECTORY, bound="> 0", effect=INITIAL_ONLY, help="Standard deviation of the initial weights."
    )
    attention_dropout: float = option(
        0.0, TRAJECTORY, bound="at least 0 and below 1", help="Dropout probability of attention weights."
    )
    hidden_dropout: float = option(
        0.0, TRAJECTORY, bound="at least 0 and below 1", help="Dropout probability of the residual branches."
    )
    normalization: str = option(
        "RMSNorm", INCOMPATIBLE, choices=("RMSNorm", "LayerNorm"), help="Kind of norm: RMSNorm | LayerNorm (with bias)."
    )
    position_embedding_type: str = option(
        "rope",
        INCOMPATIBLE,
        choices=("rope", "learned_absolute", "none"),
        help="Kind of positions: rope (rotary) | learned_absolute (a table of `seq_length` rows) | none.",
    )
    rope_scaling: dict[str, Any] | None = option(
        None,
        TRAJECTORY,
        help="Scaling of rotary positions in Hugging Face's form, {rope_type: linear, factor: 2.0}; or llama3, "
        "yarn (both with original_max_position_embeddings), or dynamic, which acts on sequences longer than "
        "`seq_length`.",
    )
    gated_linear_unit: bool = option(
        True, INCOMPATIBLE, help="Gate the feed-forward block with a third matrix (SwiGLU with silu)."
    )
    activation_func: str = option(
        "silu",
        INCOMPATIBLE,
        choices=("silu", "gelu", "gelu_tanh", "relu", "relu2"),
        help="Activation of the feed-forward block: silu | gelu | gelu_tanh | relu | relu2 (squared).",
    )
    add_bias_linear: bool = option(
        False, INCOMPATIBLE, help="Use biases in the attention output and the feed-forward matrices."
    )
    qk_layernorm: bool = option(
        False, INCOMPATIBLE, help="Normalize each head's query and key before the rotation (Qwen3)."
    )
    recompute_granularity: str | None = option(
        None,
        SAFE,
        choices=("full", "selective"),
        known_as=("gradient_checkpointing", "activation_checkpointing"),
        help="Activation checkpointing: full recomputes a layer in the backward pass | selective keeps the results of "
        "its matrix products and attention and recomputes the rest; None keeps all activations.",
    )
    recompute_interval: int = option(
        1,
        SAFE,
        bound="> 0",
        needs="model.recompute_granularity",
        help="Apply it to every n-th layer, starting with the first; 1 is all of them.",
    )
    offload_activations: bool = option(
        False,
        SAFE,
        known_as=("activation_offloading", "cpu_offloading"),
        help="Keep the activations of the forward pass in pinned host memory until the backward pass; for GPUs.",
    )
    chunked_loss: bool | None = option(
        None,
        SAFE,
        help="Compute the loss in chunks of tokens, so that the logits of a whole micro-batch never exist; None: for a "
        "vocabulary of at least 65,536 tokens.",
    )
    fused_linear_loss: bool = option(
        False,
        SAFE,
        known_as=("use_liger_kernel", "cross_entropy_loss_fusion"),
        help="Compute head and loss in one kernel of liger-kernel, in place of chunks; for GPUs.",
    )
    log_max_attention_logit: bool = option(
        False,
        SAFE,
        help="Report the largest attention logit of each step, at the cost of a second product of queries and keys.",
    )
    num_moe_experts: int | None = option(
        None, INCOMPATIBLE, bound="> 0", help="Experts of a mixture-of-experts layer; None is a dense model."
    )
    moe_layer_freq: int | list[int] = option(
        1,
        INCOMPATIBLE,
        help="The layers that have experts: every n-th starting with the first, or a list of 0 or 1 for each layer.",
    )
    moe_ffn_hidden_size: int | None = option(
        None, INCOMPATIBLE, bound="> 0", help="Width of an expert; None is `ffn_hidden_size`."
    )
    moe_router_topk: int = option(2, TRAJECTORY, bound="> 0", help="Experts that each token is routed to.")
    moe_router_score_function: str = option(
        "softmax",
        TRAJECTORY,
        choices=("softmax", "sigmoid"),
        help="Function that turns router logits into scores: softmax | sigmoid.",
    )
    moe_router_pre_softmax: bool = option(
        False,
        TRAJECTORY,
        help="Apply the softmax over all experts and keep the chosen ones' shares; False applies it over the "
        "chosen ones, which then sum to 1.",
    )
    moe_router_topk_scaling_factor: float | None = option(
        None, TRAJECTORY, bound="> 0", help="Factor on the weights of the chosen experts."
    )
    moe_router_load_balancing_type: str | list[str] = option(
        "aux_loss",
        TRAJECTORY,
        elements=("aux_loss", "seq_aux_loss", "global_aux_loss", "none"),
        help="Load-balancing loss: aux_loss (of each micro-batch) | seq_aux_loss (of each sequence) | "
        "global_aux_loss (of the step so far, over all ranks) | none; or a list of several.",
    )
    moe_aux_loss_coeff: float | list[float] = option(
        0.0, TRAJECTORY, help="Coefficient of the load-balancing loss, or a list with one for each of several."
    )
    moe_z_loss_coeff: float | None = option(
        None, TRAJECTORY, bound=">= 0", help="Coefficient of the z loss, which keeps router logits small."
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        INCOMPATIBLE,
        help="Balance experts by a bias on their selection, adjusted after each step, instead of by a loss.",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, TRAJECTORY, bound="from 0 to 1", help="Change of that bias per step."
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        help="Width of the shared expert that every token passes through; None disables it.",
    )
    moe_shared_expert_gate: bool = option(False, INCOMPATIBLE, help="Put a learned gate in front of the shared expert.")
    moe_expert_capacity_factor: float | None = option(
        None,
        TRAJECTORY,
        bound="> 0",
        help="Capacity of an expert in training as a multiple of an even share; tokens beyond it are dropped. None "
        "drops none; nor do evaluation and generation.",
    )
    moe_token_drop_policy: str = option(
        "probs",
        TRAJECTORY,
        choices=("probs", "position"),
        help="Tokens that an overfull expert drops: probs (those with the lowest scores) | position (the last ones).",
    )
    moe_grouped_gemm: bool = option(
        True,
        SAFE,
        help="Compute all experts in one grouped matrix product, where torch supports it for the device and type.",
    )
    moe_per_layer_logging: bool = option(
        False,
        SAFE,
        help="Report the router's losses of each layer too, as `moe/<name>_layer_<index>`; for loads use "
        "`RouterMonitor`.",
    )
    mtp_num_layers: int | None = option(
        None,
        INCOMPATIBLE,
        bound="> 0",
        help="Depth of multi-token prediction: additional layers that predict the tokens after the next.",
    )
    mtp_loss_scaling_factor: float = option(
        0.1, TRAJECTORY, bound=">= 0", help="Weight of the mean loss of multi-token prediction."
    )


FFN_MULTIPLE = 64
"""The default width of a gated feed-forward block is rounded up to a multiple of this."""


def default_ffn_hidden_size(hidden_size: int, is_gated: bool) -> int:
    """Width of a feed-forward block that is left open: as wide as keeps the parameters those of 4 times the hidden
    size without a gate."""
    if not is_gated:
        return 4 * hidden_size
    return -(-8 * hidden_size // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
