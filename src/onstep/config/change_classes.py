"""What a changed value means for a run that goes on: every key of a configuration has one class, none by default."""

from __future__ import annotations

from enum import StrEnum

from onstep.config.rules import dotted
from onstep.errors import ConfigError


class ChangeClass(StrEnum):
    """What changing a key does to a run that continues from a checkpoint."""

    SAFE = "safe"
    """Nothing that is learned depends on it."""
    TRAJECTORY = "changes the trajectory"
    """What is learned from here on is another thing; the stored state still loads."""
    INCOMPATIBLE = "incompatible"
    """The stored state does not fit any more."""


SAFE = (
    *dotted(
        {
            "train": (
                "micro_batch_size",
                "exit_interval",
                "exit_duration_in_mins",
                "exit_signal_handler",
                "exit_signals",
                "data_timeout",
                "manual_gc",
                "manual_gc_interval",
                "manual_gc_eval",
                "empty_unused_memory_level",
                "check_weight_hash_across_dp_replicas_interval",
                "train_sync_interval",
                "check_optimizer_step_success",
                "skip_sync_grad_norm_across_mp",
            ),
            "validation": (
                "eval_iters",
                "eval_interval",
                "start_eval_at_iter",
                "eval_global_batch_size",
                "eval_micro_batch_size",
                "skip_train",
                "eval_on_start",
                "eval_each_epoch",
                "eval_on_save",
                "start_eval_at_epoch",
                "eval_after_training",
            ),
            "dataset": ("cache_dir", "num_workers", "pin_memory", "persistent_workers"),
            "logger": (
                "log_interval",
                "log_first_step",
                "log_on_each_epoch",
                "logging_level",
                "logging_dir",
                "log_progress",
                "report_to",
                "log_params_norm",
                "log_throughput",
                "timing_log_level",
                "timing_log_option",
                "log_energy",
                "throughput_window_size",
                "tensorboard_dir",
                "tensorboard_log_interval",
                "tensorboard_queue_size",
                "log_throughput_to_tensorboard",
                "log_timers_to_tensorboard",
                "log_loss_scale_to_tensorboard",
                "log_validation_ppl_to_tensorboard",
                "log_memory_to_tensorboard",
                "memory_keys",
                "log_l2_norm_grad_to_tensorboard",
                "log_runtime_to_tensorboard",
                "runtime_time_unit",
                "log_world_size_to_tensorboard",
                "skip_train_metrics_log",
                "wandb_project",
                "wandb_exp_name",
                "wandb_save_dir",
                "wandb_entity",
                "mlflow_experiment",
                "mlflow_run_name",
                "mlflow_tracking_uri",
                "mlflow_tags",
                "mlflow_description",
                "comet_project",
                "comet_experiment_name",
                "comet_workspace",
                "comet_tags",
            ),
            "profiling": (
                "record_memory_history",
                "memory_snapshot_path",
                "use_pytorch_profiler",
                "use_nsys_profiler",
                "profile_step_start",
                "profile_step_end",
                "profile_ranks",
                "pytorch_profiler_collect_shapes",
                "pytorch_profiler_collect_callstack",
                "pytorch_profiler_collect_chakra",
                "record_shapes",
                "nvtx_ranges",
            ),
            "ft": (
                "watchdog_seconds",
                "calc_ft_timeouts",
                "enable_ft_package",
                "simulate_fault",
                "simulated_fault_type",
                "simulated_fault_rank",
                "simulated_fault_base_delay",
            ),
            "straggler": (
                "log_straggler",
                "straggler_minmax_count",
                "straggler_ctrlr_port",
                "open_port",
                "disable_straggler_on_startup",
                "threshold",
                "stop_if_detected",
            ),
            "nvrx_straggler": (
                "enabled",
                "report_time_interval",
                "calc_relative_gpu_perf",
                "calc_individual_gpu_perf",
                "num_gpu_perf_scores_to_print",
                "gpu_relative_perf_threshold",
                "gpu_individual_perf_threshold",
                "stop_if_detected",
                "enable_logging",
                "profiling_interval",
            ),
            "model": ("recompute_granularity", "log_max_attention_logit", "moe_grouped_gemm", "moe_per_layer_logging"),
            "optimizer": ("log_num_zeros_in_grad",),
            "scheduler": ("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"),
            "ddp": ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view"),
            "dist": ("distributed_backend", "distributed_timeout_minutes", "device"),
            "checkpoint": (
                "save",
                "save_interval",
                "save_each_epoch",
                "save_on_best",
                "save_at_end",
                "non_persistent_save_interval",
                "async_save",
                "save_optim",
                "save_rng",
                "components",
                "on_save_error",
                "resume",
                "load",
                "ckpt_step",
                "exit_on_missing_checkpoint",
                "on_config_change",
                "most_recent_k",
                "keep_every_n",
                "keep_best_n",
                "load_best_model_at_end",
                "validate_replication",
                "certify",
            ),
            "anomaly": ("max_skips", "max_rollbacks"),
            "rerun_state_machine": (
                "rerun_mode",
                "check_for_nan_in_loss",
                "check_for_spiky_loss",
                "spiky_loss_factor",
                "error_injection_rate",
                "error_injection_type",
            ),
            "run": ("name", "output_dir", "recipe", "fresh", "default_callbacks", "save_weights"),
        }
    ),
    "env_vars",
    "trainer",
)
"""Logging, evaluation, paths, workers, ranks, retention, limits: the same weights come out."""

TRAJECTORY = (
    *dotted(
        {
            "train": (
                "global_batch_size",
                "train_iters",
                "train_samples",
                "num_epochs",
                "rampup_batch_size",
                "step_batch_size_schedule",
                "decrease_batch_size_if_needed",
                "iterations_to_skip",
                "drop_last",
                "loss_weighting",
                "on_nonfinite",
            ),
            "validation": ("metric_for_best_model", "greater_is_better"),
            "optimizer": (
                "lr",
                "min_lr",
                "weight_decay",
                "adam_beta1",
                "adam_beta2",
                "adam_eps",
                "sgd_momentum",
                "muon_momentum",
                "muon_nesterov",
                "muon_num_ns_steps",
                "muon_adjust_lr_fn",
                "decoupled_lr",
                "decoupled_min_lr",
                "grad_norm_skip_threshold",
                "clip_grad",
                "loss_scale",
                "initial_loss_scale",
                "min_loss_scale",
                "loss_scale_window",
                "hysteresis",
            ),
            "scheduler": (
                "lr_decay_style",
                "lr_wsd_decay_style",
                "lr_decay_iters",
                "lr_decay_samples",
                "lr_wsd_decay_iters",
                "lr_wsd_decay_samples",
                "lr_warmup_fraction",
                "lr_warmup_iters",
                "lr_warmup_samples",
                "lr_warmup_init",
                "start_weight_decay",
                "end_weight_decay",
                "weight_decay_incr_style",
                "max_steps",
            ),
            "model": (
                "seq_length",
                "rotary_base",
                "layernorm_epsilon",
                "init_method_std",
                "attention_dropout",
                "hidden_dropout",
                "rope_scaling",
                "moe_router_topk",
                "moe_router_score_function",
                "moe_router_pre_softmax",
                "moe_router_topk_scaling_factor",
                "moe_router_load_balancing_type",
                "moe_aux_loss_coeff",
                "moe_z_loss_coeff",
                "moe_router_bias_update_rate",
                "moe_expert_capacity_factor",
                "moe_token_drop_policy",
                "mtp_loss_scaling_factor",
            ),
            "dataset": (
                "kind",
                "paths",
                "text_key",
                "weights",
                "hf_subset",
                "hf_split",
                "messages_key",
                "prompt_key",
                "response_key",
                "packing",
                "eod_mask_loss",
                "reset_attention_mask",
                "split",
                "seq_length",
                "shuffle",
            ),
            "peft": ("alpha", "dropout"),
            "tokenizer": ("tokenizer_model",),
            "ddp": ("broadcast_buffers",),
            "rng": ("seed", "data_seed"),
            "checkpoint": ("load_optim", "load_rng", "pretrained_checkpoint", "finetune"),
            "anomaly": (
                "on_spike",
                "spike_metrics",
                "spike_threshold",
                "spike_window",
                "spike_warmup",
                "rollback_lr_factor",
            ),
            "trainer": ("label_names", "remove_unused_columns"),
        }
    ),
    "mixed_precision",
)
"""Optimizer, schedule, batch, data, length: the run would go on in another way than it was started."""

INCOMPATIBLE = dotted(
    {
        "model": (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "vocab_size",
            "make_vocab_size_divisible_by",
            "add_qkv_bias",
            "share_embeddings_and_output_weights",
            "normalization",
            "position_embedding_type",
            "gated_linear_unit",
            "activation_func",
            "add_bias_linear",
            "qk_layernorm",
            "num_moe_experts",
            "moe_layer_freq",
            "moe_ffn_hidden_size",
            "moe_router_enable_expert_bias",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "mtp_num_layers",
        ),
        "optimizer": ("optimizer", "param_groups"),
        "tokenizer": ("tokenizer_type", "vocab_size"),
        "peft": ("peft_scheme", "dim", "target_modules"),
    }
)
"""Shapes of the weights, what the optimizer keeps, what a token id means."""

OPEN_SECTIONS = ("trainer", "env_vars")
"""Dictionaries: an entry that has no class of its own has that of its dictionary."""

CLASSES: dict[str, ChangeClass] = {
    **dict.fromkeys(SAFE, ChangeClass.SAFE),
    **dict.fromkeys(TRAJECTORY, ChangeClass.TRAJECTORY),
    **dict.fromkeys(INCOMPATIBLE, ChangeClass.INCOMPATIBLE),
}
"""The class of every key."""

_SCHEDULE = "the learning rate follows today's schedule at the step reached"
_LENGTH = "the run ends later or sooner; a schedule that ends with it is recomputed, the learning rate jumps to it"
_DATA = "samples of today's data from the position reached on"
_INITIAL = "no effect any more: the checkpoint has the state that it started"

MEANINGS: dict[str, str] = {
    "optimizer.lr": _SCHEDULE,
    "optimizer.min_lr": _SCHEDULE,
    "optimizer.decoupled_lr": f"{_SCHEDULE}; it cannot be set or unset",
    "optimizer.decoupled_min_lr": f"{_SCHEDULE}; it cannot be set or unset",
    "train.train_iters": _LENGTH,
    "train.train_samples": _LENGTH,
    "train.num_epochs": _LENGTH,
    "train.global_batch_size": "the position in samples stays; steps count on from where they are",
    "rng.seed": "no effect on weights and dropout, whose state is loaded; where data_seed is unset, see there",
    "rng.data_seed": "another order of samples from the position reached on: some come twice this epoch, some not",
    "dataset.shuffle": "another order of samples from the position reached on: some come twice this epoch, some not",
    "dataset.seq_length": _DATA,
    "dataset.paths": _DATA,
    "dataset.split": _DATA,
    "dataset.text_key": _DATA,
    "dataset.kind": _DATA,
    "dataset.weights": _DATA,
    "dataset.hf_subset": _DATA,
    "dataset.hf_split": _DATA,
    "dataset.messages_key": _DATA,
    "dataset.prompt_key": _DATA,
    "dataset.response_key": _DATA,
    "dataset.packing": _DATA,
    "model.init_method_std": _INITIAL,
    "optimizer.initial_loss_scale": _INITIAL,
    "mixed_precision": "weights and optimizer load as they are; steps compute in today's precision",
    "validation.metric_for_best_model": "today's metric is followed from the next evaluation on",
    "checkpoint.load_optim": "the optimizer starts without its moments",
    "checkpoint.load_rng": "the random generators start from the seed",
    "checkpoint.pretrained_checkpoint": _INITIAL,
    "checkpoint.finetune": _INITIAL,
}
"""What `apply` does, for the keys where it is not plain that today's value holds from the next step on."""


def classify(key: str) -> ChangeClass:
    """The class of a dotted key, also of an entry of a dictionary (`trainer.label_names`).

    Raises:
        ConfigError: for a key that a configuration does not have.
    """
    section = key.partition(".")[0]
    found = CLASSES.get(key, CLASSES[section] if section in OPEN_SECTIONS else None)
    if found is None:
        raise ConfigError(f"{key!r} is no key of a configuration, so a change of it has no class.")
    return found


def meaning(key: str) -> str:
    """What going on with today's value of a key does, in words; '' where the key is safe or does not fit at all."""
    if classify(key) is not ChangeClass.TRAJECTORY:
        return ""
    default = _SCHEDULE if key.startswith("scheduler.") else "holds from the next step on"
    return MEANINGS.get(key, default)
