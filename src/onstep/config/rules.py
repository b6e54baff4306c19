"""The rules that one value keeps on its own, by dotted key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from onstep.config.part import nearest
from onstep.errors import ConfigError

DECAY_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
PRECISIONS = {
    "bf16_mixed": "bf16_mixed",
    "bf16-mixed": "bf16_mixed",
    "fp16_mixed": "fp16_mixed",
    "fp16-mixed": "fp16_mixed",
}
"""Spellings of `mixed_precision` and the one used inside."""


def dotted(names: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The dotted keys of names by section."""
    return tuple(f"{section}.{name}" for section, members in names.items() for name in members)


POSITIVE = dotted(
    {
        "train": (
            "micro_batch_size",
            "global_batch_size",
            "train_iters",
            "train_samples",
            "num_epochs",
            "exit_interval",
            "exit_duration_in_mins",
            "data_timeout",
            "check_weight_hash_across_dp_replicas_interval",
            "train_sync_interval",
        ),
        "validation": ("eval_interval", "eval_global_batch_size", "eval_micro_batch_size"),
        "optimizer": (
            "lr",
            "adam_eps",
            "loss_scale",
            "initial_loss_scale",
            "min_loss_scale",
            "loss_scale_window",
            "hysteresis",
            "decoupled_lr",
            "grad_norm_skip_threshold",
            "muon_num_ns_steps",
        ),
        "checkpoint": ("save_interval", "non_persistent_save_interval", "keep_every_n"),
        "anomaly": ("spike_threshold", "spike_window", "spike_warmup", "rollback_lr_factor"),
        "rerun_state_machine": ("spiky_loss_factor",),
        "scheduler": ("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "max_steps"),
        "model": (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "vocab_size",
            "make_vocab_size_divisible_by",
            "seq_length",
            "rotary_base",
            "layernorm_epsilon",
            "init_method_std",
            "num_moe_experts",
            "moe_ffn_hidden_size",
            "moe_router_topk",
            "moe_shared_expert_intermediate_size",
            "moe_expert_capacity_factor",
            "mtp_num_layers",
        ),
        "dataset": ("seq_length",),
        "logger": ("throughput_window_size", "tensorboard_log_interval", "tensorboard_queue_size"),
        "profiling": ("profile_step_end",),
        "ft": ("watchdog_seconds",),
        "straggler": ("straggler_minmax_count", "straggler_ctrlr_port"),
        "nvrx_straggler": ("report_time_interval", "profiling_interval"),
        "peft": ("dim", "alpha"),
        "tokenizer": ("vocab_size",),
        "ddp": ("bucket_cap_mb",),
        "dist": ("distributed_timeout_minutes",),
    }
)

NOT_NEGATIVE = dotted(
    {
        "train": ("manual_gc_interval",),
        "validation": ("eval_iters", "start_eval_at_iter", "start_eval_at_epoch"),
        "optimizer": ("min_lr", "decoupled_min_lr", "weight_decay", "clip_grad"),
        "model": ("moe_z_loss_coeff", "moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
        "profiling": ("profile_step_start",),
        "ft": ("simulated_fault_rank", "simulated_fault_base_delay"),
        "nvrx_straggler": ("num_gpu_perf_scores_to_print",),
        "scheduler": (
            "lr_warmup_fraction",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr_warmup_init",
            "start_weight_decay",
            "end_weight_decay",
        ),
        "dataset": ("num_workers",),
        "logger": ("log_interval", "logging_level"),
        "checkpoint": ("ckpt_step", "keep_best_n"),
        "anomaly": ("max_skips", "max_rollbacks"),
        "rerun_state_machine": ("error_injection_rate",),
        "rng": ("seed", "data_seed"),
    }
)

BELOW_ONE = dotted(
    {
        "optimizer": ("adam_beta1", "adam_beta2", "sgd_momentum", "muon_momentum"),
        "model": ("attention_dropout", "hidden_dropout"),
        "peft": ("dropout",),
    }
)

UNLIMITED = ("optimizer.grad_norm_skip_threshold",)
"""Limits that may be infinite, which is the same as None."""

CHOICES: dict[str, tuple[str, ...]] = {
    "train.loss_weighting": ("auto", "tokens", "samples", "microbatches"),
    "train.on_nonfinite": ("raise", "stop", "skip", "rollback"),
    "anomaly.on_spike": ("ignore", "raise", "stop", "skip", "rollback"),
    "checkpoint.on_save_error": ("stop", "continue"),
    "checkpoint.on_config_change": ("error", "keep", "apply"),
    "rerun_state_machine.rerun_mode": ("disabled", "validate_results", "report_determinism_stats"),
    "rerun_state_machine.error_injection_type": ("correct_result", "transient_error", "persistent_error"),
    "optimizer.optimizer": ("adam", "sgd", "muon"),
    "optimizer.muon_adjust_lr_fn": ("match_rms_adamw", "original"),
    "model.normalization": ("RMSNorm", "LayerNorm"),
    "model.position_embedding_type": ("rope", "learned_absolute", "none"),
    "model.activation_func": ("silu", "gelu", "gelu_tanh", "relu", "relu2"),
    "model.recompute_granularity": ("full",),
    "model.moe_router_score_function": ("softmax", "sigmoid"),
    "model.moe_token_drop_policy": ("probs", "position"),
    "dataset.kind": ("text", "megatron", "huggingface", "chat"),
    "logger.timing_log_option": ("max", "minmax", "all"),
    "ft.simulated_fault_type": ("random", "rank_killed", "rank_hung"),
    "peft.peft_scheme": ("lora",),
    "scheduler.lr_decay_style": DECAY_STYLES,
    "scheduler.lr_wsd_decay_style": WSD_DECAY_STYLES,
    "scheduler.weight_decay_incr_style": ("constant", "linear", "cosine"),
    "logger.runtime_time_unit": ("seconds", "minutes", "hours", "days"),
    "tokenizer.tokenizer_type": ("bytes", "bpe", "tokenizers", "huggingface"),
    "dist.distributed_backend": ("gloo", "nccl"),
}


def check_values(values: Mapping[str, Any]) -> None:
    """Check each value of a flat configuration on its own; None is checked nowhere.

    Raises:
        ConfigError: naming the key, the value and the rule.
    """
    given = {key: value for key, value in values.items() if value is not None}
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value) and not (key in UNLIMITED and value > 0):
            raise ConfigError(f"{key}={value} must be a finite number.")
    for key in (key for key in POSITIVE if given.get(key, 1) <= 0):
        raise ConfigError(f"{key}={given[key]} must be > 0.")
    for key in (key for key in NOT_NEGATIVE if given.get(key, 0) < 0):
        raise ConfigError(f"{key}={given[key]} must be >= 0.")
    for key in (key for key in BELOW_ONE if not 0 <= given.get(key, 0) < 1):
        raise ConfigError(f"{key}={given[key]} must be at least 0 and below 1.")
    for key in (key for key, choices in CHOICES.items() if given.get(key, choices[0]) not in choices):
        raise not_a_choice(key, given[key], CHOICES[key])
    _check_precision(given.get("mixed_precision"))
    _check_device(given.get("dist.device"))


def not_a_choice(key: str, value: Any, choices: tuple[str, ...]) -> ConfigError:
    """The error for a value that is none of the choices; it names the nearest one."""
    hint = nearest(value, list(choices)) if isinstance(value, str) else ""
    return ConfigError(f"{key}={value!r} must be {' | '.join(choices)}.{hint}")


def parse_split(text: str) -> tuple[float, float, float]:
    """The shares of train, validation and test as fractions of 1, from text such as '90,5,5'.

    Missing shares are 0, so '100' trains on everything.

    Raises:
        ConfigError: not one to three numbers >= 0 with a sum above 0.
    """
    try:
        shares = [float(share) for share in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or sum(shares) == 0:
        raise ConfigError(f"dataset.split={text!r} must be the shares of train, validation and test, such as '90,5,5'.")
    train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
    return train, valid, test


def _check_precision(value: str | None) -> None:
    if value is None or value in PRECISIONS:
        return
    raise ConfigError(
        f"mixed_precision={value!r} must be null (float32), 'bf16_mixed' or 'fp16_mixed'."
        f"{nearest(value, list(PRECISIONS))}"
    )


def _check_device(value: str | None) -> None:
    if value is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ConfigError(f"dist.device={value!r} must be cpu, cuda, cuda:<n>, or null for CUDA where there is one.")
