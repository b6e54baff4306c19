"""What the page "Trainer Callbacks" documents, as tables."""

from __future__ import annotations

from typing import Any

REQUIRED = object()
"""A parameter without a default."""

PARAMETERS: dict[str, dict[str, Any]] = {
    "DefaultMetrics": {"peak_hardware_flops": None},
    "ProgressCallback": {
        "use_tqdm": None,
        "output_stream": None,
        "step_columns": None,
        "final_metrics": None,
        "header_interval": 20,
    },
    "InfoCallback": {"verbose": False},
    "DivergenceDetector": {
        "smoothing": 0.3,
        "threshold": 1.0,
        "relative_threshold": None,
        "patience": 3,
        "warmup": 10,
        "action": "stop",
        "use_eval_loss": False,
        "metric_key": None,
    },
    "JsonLogger": {"kwargs": REQUIRED},
    "TBLogger": {"summary_writer": REQUIRED, "scalars": None, "experiment_info": None},
    "GradNormLogger": {},
    "ParameterNormLogger": {"log_norms": True, "log_spectral_norms": True, "power_iter_steps": 10},
    "WeightNormLogger": {},
    "PeakMemory": {
        "summary_writer": None,
        "show_details": False,
        "do_log": False,
        "enable_memory_snapshot": False,
        "file_prefix": "memory_snapshot",
    },
    "TextgenCallback": {
        "summary_writer": REQUIRED,
        "prompts": REQUIRED,
        "generation_config": None,
        "generation_steps": None,
        "max_new_tokens": 200,
    },
    "ProfilerCallback": {
        "start_step": 3,
        "num_steps": 5,
        "output_dir": "benchmarks/profiles",
        "with_stack": True,
        "with_flops": True,
        "record_shapes": True,
    },
    "ResumableSummaryWriter": {"log_dir": REQUIRED},
    "TrainerControlCallback": {
        "job_id": None,
        "port": None,
        "enable_http": None,
        "host": None,
        "auth_token": None,
        "disable_auth": False,
    },
    "DiLoCoCallback": {
        "server_addr": None,
        "sync_every": None,
        "worker_id": None,
        "bf16_comm": None,
        "dylu": None,
        "heartbeat_interval": None,
        "num_fragments": None,
        "timeout": 600,
        "max_sync_retries": 3,
    },
    "TraceMalloc": {"top_k": 10, "monitor_system_memory": True, "comprehensive_mode": True},
}
"""Class: its documented parameters in order, with their defaults."""

METHODS: dict[str, tuple[str, ...]] = {
    "DivergenceDetector": ("on_log", "on_evaluate"),
    "GradNormLogger": ("on_pre_optimizer_step", "on_evaluate"),
    "TBLogger": ("mapping_as_markdown",),
    "DefaultMetrics": ("on_log_step",),
    "DiLoCoCallback": ("on_train_begin", "on_log", "on_train_end", "active"),
    "TrainerControlCallback": ("on_train_begin", "on_log", "on_train_end"),
}

STATEFUL = (
    "DiLoCoCallback",
    "DivergenceDetector",
    "JsonLogger",
    "GradNormLogger",
    "ParameterNormLogger",
    "ResumableSummaryWriter",
)

WRITER_METHODS = (
    "add_scalar",
    "add_scalars",
    "add_text",
    "add_histogram",
    "add_image",
    "add_images",
    "add_figure",
    "add_graph",
    "flush",
    "close",
)
"""What `ResumableSummaryWriter` hands on to TensorBoard's writer."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "PeakMemory": (
        "rank",
        "world_size",
        "summary_writer",
        "enabled",
        "show_details",
        "do_log",
        "enable_memory_snapshot",
        "max_allocated",
    ),
}

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_substep_end",
    "on_forward_backward_begin",
    "on_forward_backward_end",
    "on_optimizer_step",
    "on_pre_optimizer_step",
    "on_evaluate",
    "on_predict",
    "on_prediction_step",
    "on_save",
    "on_log",
    "on_log_step",
    "on_train_metrics",
)

KEYWORDS = ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader", "trainer")
"""What every handler is called with beside arguments, state and control."""

TB_TAGS = ("train-loss", "learning-rate", "grad-norm", "eval-loss", "eval-perplexity")
"""What `TBLogger` writes unless told otherwise."""

STEP_COLUMNS = (
    "epoch",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens",
    "total_tokens",
    "tok_per_sec",
    "mfu",
    "peak_mem",
)
FINAL_METRICS = (
    "train_runtime",
    "step",
    "train_samples",
    "effective_batch_size",
    "train_samples_per_second",
    "train_steps_per_second",
    "epoch",
    "total_tokens",
    "tokens_per_second",
    "total_flops",
    "flops_per_second",
)
