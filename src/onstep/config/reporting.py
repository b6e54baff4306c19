"""The parts of a configuration that say what is reported, where to, and what is recorded of memory."""

from __future__ import annotations

from dataclasses import dataclass, field

from onstep.config.part import ConfigPart


@dataclass
class LoggerConfig(ConfigPart):
    """What is reported, and how often."""

    log_interval: int = 100
    """Steps between logged steps; 0 logs nothing."""
    log_first_step: bool = False
    """Log step 1 too."""
    log_on_each_epoch: bool = False
    """Log at the end of each epoch."""
    logging_level: int | None = None
    """Level of the `onstep` logger; None leaves it."""
    logging_dir: str | None = None
    """Where the journal and trackers write; None is the run's folder."""
    log_progress: bool = False
    """Append starts and saves to `progress.txt` in the folder of the checkpoints."""
    report_to: list[str] | str | None = None
    """Trackers for the metrics of the journal, one or a list: csv, tensorboard, wandb, mlflow, comet, trackio; read by
    `onstep train` and `Trainer`."""
    log_params_norm: bool = False
    """Report the L2 norm of all parameters."""
    log_throughput: bool = False
    """Show TFLOP/s per device in the console line."""
    throughput_window_size: int = 100
    """Steps that the windowed throughput is measured over."""
    tensorboard_dir: str | None = None
    """Where Megatron Bridge's tags go for TensorBoard; None writes none."""
    tensorboard_log_interval: int = 1
    """Steps between points of Megatron Bridge's tags, in every tracker."""
    tensorboard_queue_size: int = 1000
    """Points that wait for TensorBoard at the most."""
    log_throughput_to_tensorboard: bool = False
    """Report `throughput/...`."""
    log_timers_to_tensorboard: bool = False
    """Report `<timer>-time` and `iteration-time`."""
    log_loss_scale_to_tensorboard: bool = True
    """Report `loss-scale`."""
    log_validation_ppl_to_tensorboard: bool = False
    """Report the perplexity beside each validation loss."""
    log_memory_to_tensorboard: bool = False
    """Report `memory/...` of CUDA's allocator."""
    memory_keys: dict[str, str] | None = None
    """Statistics of CUDA's allocator and the names they are reported under; None is `MEMORY_KEYS`."""
    log_l2_norm_grad_to_tensorboard: bool = False
    """Report `l2_norm/grad/<parameter>`."""
    log_runtime_to_tensorboard: bool = False
    """Report `time/...`."""
    runtime_time_unit: str = "hours"
    """seconds | minutes | hours | days"""
    log_world_size_to_tensorboard: bool = False
    """Report `world-size`."""
    skip_train_metrics_log: bool = False
    """Leave Megatron Bridge's tags and console line of training out."""
    wandb_project: str | None = None
    """W&B project that Megatron Bridge's tags go to; None writes none."""
    wandb_exp_name: str | None = None
    """Name of the W&B run; None is the run's."""
    wandb_save_dir: str | None = None
    """Where W&B keeps its files; None is the run's folder."""
    wandb_entity: str | None = None
    """W&B user or team."""
    mlflow_experiment: str | None = None
    """MLflow experiment that Megatron Bridge's tags go to; None writes none."""
    mlflow_run_name: str | None = None
    """Name of the MLflow run; None is the run's."""
    mlflow_tracking_uri: str | None = None
    """MLflow's store; None is `mlruns` in the run's folder."""
    mlflow_tags: dict[str, str] | None = None
    """Tags of the MLflow run."""
    mlflow_description: str | None = None
    """Note of the MLflow run."""
    comet_project: str | None = None
    """Comet project that Megatron Bridge's tags go to; None writes none."""
    comet_experiment_name: str | None = None
    """Name of the Comet experiment; None is the run's."""
    comet_workspace: str | None = None
    """Comet workspace; the key is read from the environment (`COMET_API_KEY`)."""
    comet_tags: list[str] | None = None
    """Tags of the Comet experiment."""


@dataclass
class ProfilingConfig(ConfigPart):
    """What the allocator of CUDA records."""

    record_memory_history: bool = False
    """Record CUDA's allocations, for a snapshot at `profile_step_end` and when memory runs out."""
    memory_snapshot_path: str = "snapshot.pickle"
    """Where snapshots go; the rank is put before the suffix."""
    profile_step_end: int = 12
    """Step after which the snapshot is written."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that record."""
