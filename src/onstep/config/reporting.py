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
    timing_log_level: int = 0
    """What is timed: -1 nothing | 0 set-up, saves and evaluations | 1 also the parts of a step | 2 also its
    micro-batches. With 1 and 2 the device is waited for, and times are printed at logged steps."""
    timing_log_option: str = "minmax"
    """What is shown of the ranks' times: max | minmax | all."""
    log_energy: bool = False
    """Report joules and watts of a GPU at logged steps, where NVIDIA's driver tells them (pynvml, of the extra `gpu`);
    elsewhere one warning."""
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
    """Report `iteration-time`, and `<timer>-time` of what `timing_log_level` 1 and 2 measure."""
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
    """What is profiled, and what the allocator of CUDA records."""

    use_pytorch_profiler: bool = False
    """Write a trace of torch's profiler, `torch_profile/rank-<r>.json.gz` beside `logger.tensorboard_dir` or in the
    run's folder, of the steps after `profile_step_start` up to `profile_step_end`."""
    use_nsys_profiler: bool = False
    """Mark the same steps for `nsys profile -c cudaProfilerApi`."""
    profile_step_start: int = 10
    """Steps that are done before a profile begins."""
    pytorch_profiler_collect_shapes: bool = False
    """Keep the shapes of operands in torch's trace."""
    pytorch_profiler_collect_callstack: bool = False
    """Keep Python's stack in torch's trace."""
    pytorch_profiler_collect_chakra: bool = False
    """Write torch's execution trace too, `chakra/rank-<r>.json.gz`."""
    record_shapes: bool = False
    """Keep shapes in the ranges that nsys sees."""
    nvtx_ranges: bool = False
    """Name each step, its forward and backward passes and its update for nsys; takes a GPU."""
    record_memory_history: bool = False
    """Record CUDA's allocations, for a snapshot at `profile_step_end` and when memory runs out."""
    memory_snapshot_path: str = "snapshot.pickle"
    """Where snapshots go; the rank is put before the suffix."""
    profile_step_end: int = 12
    """Step after which a profile ends and the snapshot is written."""
    profile_ranks: list[int] = field(default_factory=lambda: [0])
    """Ranks that profile and record; empty is all for profiles, and none for memory."""
