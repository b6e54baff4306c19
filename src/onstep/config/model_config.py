"""The parts of a configuration about the model and how its weights are updated."""

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


@dataclass
class OptimizerConfig(ConfigPart):
    """The optimizer: AdamW (`adam`), `sgd` or `muon`."""

    optimizer: str = option("adam", INCOMPATIBLE, choices=("adam", "sgd", "muon"))
    """adam (AdamW) | sgd | muon (matrices of the layers by torch's Muon; embeddings, output, biases, norms and stacked
    weights of experts by AdamW)"""
    lr: float | None = option(None, TRAJECTORY, bound="> 0")
    """Largest learning rate."""
    min_lr: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Where the schedule ends; None is 0."""
    weight_decay: float = option(0.01, TRAJECTORY, bound=">= 0")
    """Decoupled decay of matrices; vectors do not decay."""
    adam_beta1: float = option(0.9, TRAJECTORY, bound="at least 0 and below 1")
    """Decay of the first moment."""
    adam_beta2: float = option(0.999, TRAJECTORY, bound="at least 0 and below 1")
    """Decay of the second moment."""
    adam_eps: float = option(1e-8, TRAJECTORY, bound="> 0")
    """Added to the denominator."""
    sgd_momentum: float = option(0.9, TRAJECTORY, bound="at least 0 and below 1")
    """Momentum of SGD."""
    clip_grad: float | None = option(1.0, TRAJECTORY, bound=">= 0")
    """Largest global gradient norm; None or 0 does not clip. The norm is computed either way."""
    loss_scale: float | None = option(None, TRAJECTORY, bound="> 0")
    """A constant loss scale, for float16 and bfloat16; None scales float16 dynamically and bfloat16 not at all."""
    initial_loss_scale: float = option(2.0**32, TRAJECTORY, bound="> 0")
    """Where the dynamic loss scale starts."""
    min_loss_scale: float = option(1.0, TRAJECTORY, bound="> 0")
    """Where it ends falling: an overflow there is an anomaly."""
    loss_scale_window: int = option(1000, TRAJECTORY, bound="> 0")
    """Clean steps after which it doubles."""
    hysteresis: int = option(2, TRAJECTORY, bound="> 0")
    """Overflows after which it halves."""
    muon_momentum: float = option(0.95, TRAJECTORY, bound="at least 0 and below 1")
    """Momentum of Muon."""
    muon_nesterov: bool = option(True, TRAJECTORY)
    """Nesterov's form of it."""
    muon_num_ns_steps: int = option(5, TRAJECTORY, bound="> 0")
    """Newton-Schulz iterations that orthogonalize an update."""
    muon_adjust_lr_fn: str = option("match_rms_adamw", TRAJECTORY, choices=("match_rms_adamw", "original"))
    """How Muon's rate follows from `lr`: match_rms_adamw (updates as large as AdamW's) | original."""
    decoupled_lr: float | None = option(None, TRAJECTORY, bound="> 0")
    """Largest learning rate of the embedding and output matrices; None is `lr`. Their own `is_decoupled_lr` groups."""
    decoupled_min_lr: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Where their schedule ends; None is `min_lr`."""
    param_groups: list[dict[str, Any]] = option([], INCOMPATIBLE)
    """Settings of some parameters, the first entry that matches a name holds: {match: '*.router.*', lr_mult: 0.1,
    wd_mult: 0.0, max_lr: ..., min_lr: ..., start_wd: ..., end_wd: ...}. `*` stands for any letters, dots too. An entry
    that matches no trainable parameter is refused."""
    grad_norm_skip_threshold: float | None = option(None, TRAJECTORY, bound="> 0", may_be_infinite=True)
    """A step whose gradient norm before clipping is above this updates nothing, counts as skipped and does not move the
    schedule; None, or infinity as in Megatron Bridge, skips none. It costs one wait for an accelerator at each step."""
    log_num_zeros_in_grad: bool = option(False, SAFE)
    """Count the exact zeros among the gradients of each step, after clipping."""


@dataclass
class SchedulerConfig(ConfigPart):
    """Learning rate and weight decay as a function of progress."""

    lr_decay_style: str = option(
        "linear", TRAJECTORY, choices=("constant", "linear", "cosine", "inverse-square-root", "WSD")
    )
    """constant | linear | cosine | inverse-square-root | WSD"""
    lr_wsd_decay_style: str = option(
        "exponential", TRAJECTORY, choices=("linear", "cosine", "exponential", "minus_sqrt")
    )
    """linear | cosine | exponential | minus_sqrt"""
    lr_decay_iters: int | None = option(None, TRAJECTORY, bound="> 0")
    """Step at which the schedule ends; None is the run's last."""
    lr_decay_samples: int | None = option(None, TRAJECTORY, bound="> 0")
    """The same in samples."""
    lr_wsd_decay_iters: int | None = option(None, TRAJECTORY, bound="> 0")
    """Length of WSD's last phase in steps."""
    lr_wsd_decay_samples: int | None = option(None, TRAJECTORY, bound="> 0")
    """The same in samples."""
    lr_warmup_fraction: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Warm-up as a share of the schedule."""
    lr_warmup_iters: int = option(0, TRAJECTORY, bound=">= 0")
    """Warm-up in steps, of which the schedule has more."""
    lr_warmup_samples: int = option(0, TRAJECTORY, bound=">= 0")
    """Warm-up in samples, of which the schedule has more."""
    lr_warmup_init: float = option(0.0, TRAJECTORY, bound=">= 0")
    """Learning rate at step 0 of the warm-up."""
    start_weight_decay: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Weight decay at step 0; None is `optimizer.weight_decay`."""
    end_weight_decay: float | None = option(None, TRAJECTORY, bound=">= 0")
    """Weight decay at the end; None is `optimizer.weight_decay`."""
    weight_decay_incr_style: str = option("constant", TRAJECTORY, choices=("constant", "linear", "cosine"))
    """constant | linear | cosine"""
    max_steps: int | None = option(None, TRAJECTORY, bound="> 0")
    """Build the schedule for a run of this many steps (at least `train_iters`)."""
    override_opt_param_scheduler: bool = option(False, SAFE)
    """On resume, the configured schedule holds, whatever the checkpoint's was and `checkpoint.on_config_change` is."""
    use_checkpoint_opt_param_scheduler: bool = option(False, SAFE)
    """On resume, the checkpoint's schedule holds, whatever is configured and `checkpoint.on_config_change` is. With
    neither, a schedule that differs is refused with both values, unless `checkpoint.on_config_change=apply`."""


FFN_MULTIPLE = 64
"""The default width of a gated feed-forward block is rounded up to a multiple of this."""


def default_ffn_hidden_size(model: ModelConfig) -> int:
    """Width of a feed-forward block that is left open: as wide as keeps the parameters those of 4 times the hidden
    size without a gate."""
    if not model.gated_linear_unit:
        return 4 * model.hidden_size
    return -(-8 * model.hidden_size // (3 * FFN_MULTIPLE)) * FFN_MULTIPLE
