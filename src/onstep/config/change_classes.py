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
            "profiling": ("record_memory_history", "memory_snapshot_path", "profile_step_end", "profile_ranks"),
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
            ),
            "dataset": ("paths", "text_key", "split", "seq_length", "shuffle"),
            "tokenizer": ("tokenizer_model",),
            "ddp": ("broadcast_buffers",),
            "rng": ("seed", "data_seed"),
            "checkpoint": ("load_optim", "load_rng"),
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
        ),
        "optimizer": ("optimizer",),
        "tokenizer": ("tokenizer_type",),
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
    "model.init_method_std": _INITIAL,
    "optimizer.initial_loss_scale": _INITIAL,
    "mixed_precision": "weights and optimizer load as they are; steps compute in today's precision",
    "validation.metric_for_best_model": "today's metric is followed from the next evaluation on",
    "checkpoint.load_optim": "the optimizer starts without its moments",
    "checkpoint.load_rng": "the random generators start from the seed",
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
