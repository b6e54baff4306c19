"""The parts of a configuration that say what is reported, where to, and what is recorded of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onstep.config.part import SAFE, Bound, ConfigPart, nearest, option
from onstep.errors import ConfigError

_TIMING_LEVEL = Bound(
    "-1 (nothing), 0 (set-up, saves, evaluations), 1 (also the parts of a step) or 2 (also its micro-batches)",
    lambda level: -1 <= level <= 2,
)


@dataclass
class LoggerConfig(ConfigPart):
    """What is reported, and how often."""

    log_interval: int = option(100, SAFE, bound=">= 0")
    """Steps between logged steps; 0 logs nothing."""
    log_first_step: bool = option(False, SAFE)
    """Log step 1 too."""
    log_on_each_epoch: bool = option(False, SAFE)
    """Log at the end of each epoch."""
    logging_level: int | None = option(None, SAFE, bound=">= 0")
    """Level of the `onstep` logger; None leaves it."""
    logging_dir: str | None = option(None, SAFE)
    """Where the journal and trackers write; None is the run's folder."""
    log_progress: bool = option(False, SAFE)
    """Append starts and saves to `progress.txt` in the folder of the checkpoints."""
    report_to: list[str] | str | None = option(None, SAFE)
    """The trackers of the run, one or a list: csv, tensorboard, wandb, mlflow, comet, trackio."""
    report_names: list[str] | str | None = option(None, SAFE)
    """Which names trackers show, in one run each: hf (`train/loss`), bridge (`lm loss`), or both. None is hf for those
    of `report_to`, bridge for those that only `tensorboard_dir`, `wandb_project` and their like ask for."""
    log_params_norm: bool = option(False, SAFE)
    """Report the L2 norm of all parameters."""
    log_throughput: bool = option(False, SAFE)
    """Show TFLOP/s per device in the console line."""
    timing_log_level: int = option(0, SAFE, _TIMING_LEVEL)
    """What is timed: -1 nothing | 0 set-up, saves and evaluations | 1 also the parts of a step | 2 also its
    micro-batches. With 1 and 2 the device is waited for, and times are printed at logged steps."""
    timing_log_option: str = option("minmax", SAFE, choices=("max", "minmax", "all"))
    """What is shown of the ranks' times: max | minmax | all."""
    log_energy: bool = option(False, SAFE)
    """Report joules and watts of a GPU at logged steps, where NVIDIA's driver tells them (pynvml, of the extra `gpu`);
    elsewhere one warning."""
    throughput_window_size: int = option(100, SAFE, bound="> 0")
    """Steps that the windowed throughput is measured over."""
    tensorboard_dir: str | None = option(None, SAFE)
    """TensorBoard's folder; without `report_to` it asks for TensorBoard, with Megatron Bridge's tags."""
    tensorboard_log_interval: int = option(1, SAFE, bound="> 0")
    """Steps between points of Megatron Bridge's tags, in every tracker."""
    tensorboard_queue_size: int = option(1000, SAFE, bound="> 0")
    """Points that wait for TensorBoard at the most."""
    log_throughput_to_tensorboard: bool = option(False, SAFE)
    """Report `throughput/...`."""
    log_timers_to_tensorboard: bool = option(False, SAFE)
    """Report `iteration-time`, and `<timer>-time` of what `timing_log_level` 1 and 2 measure."""
    log_loss_scale_to_tensorboard: bool = option(True, SAFE)
    """Report `loss-scale`."""
    log_validation_ppl_to_tensorboard: bool = option(False, SAFE)
    """Report the perplexity beside each validation loss."""
    log_memory_to_tensorboard: bool = option(False, SAFE)
    """Report `memory/...` of CUDA's allocator."""
    memory_keys: dict[str, str] | None = option(None, SAFE)
    """Statistics of CUDA's allocator and the names they are reported under; None is `MEMORY_KEYS`."""
    log_l2_norm_grad_to_tensorboard: bool = option(False, SAFE)
    """Report `l2_norm/grad/<parameter>`."""
    log_runtime_to_tensorboard: bool = option(False, SAFE)
    """Report `time/...`."""
    runtime_time_unit: str = option("hours", SAFE, choices=("seconds", "minutes", "hours", "days"))
    """seconds | minutes | hours | days"""
    log_world_size_to_tensorboard: bool = option(False, SAFE)
    """Report `world-size`."""
    skip_train_metrics_log: bool = option(False, SAFE)
    """Leave Megatron Bridge's tags and console line of training out."""
    wandb_project: str | None = option(None, SAFE)
    """W&B project; without `report_to` it asks for the tracker, with Megatron Bridge's tags."""
    wandb_exp_name: str | None = option(None, SAFE)
    """Name of the W&B run; None is the run's."""
    wandb_save_dir: str | None = option(None, SAFE)
    """Where W&B keeps its files; None is the run's folder."""
    wandb_entity: str | None = option(None, SAFE)
    """W&B user or team."""
    mlflow_experiment: str | None = option(None, SAFE)
    """MLflow experiment; without `report_to` it asks for the tracker, with Megatron Bridge's tags."""
    mlflow_run_name: str | None = option(None, SAFE)
    """Name of the MLflow run; None is the run's."""
    mlflow_tracking_uri: str | None = option(None, SAFE)
    """MLflow's store; None is `mlruns` in the run's folder."""
    mlflow_tags: dict[str, str] | None = option(None, SAFE)
    """Tags of the MLflow run."""
    mlflow_description: str | None = option(None, SAFE)
    """Note of the MLflow run."""
    comet_project: str | None = option(None, SAFE)
    """Comet project; without `report_to` it asks for the tracker, with Megatron Bridge's tags."""
    comet_experiment_name: str | None = option(None, SAFE)
    """Name of the Comet experiment; None is the run's."""
    comet_workspace: str | None = option(None, SAFE)
    """Comet workspace; the key is read from the environment (`COMET_API_KEY`)."""
    comet_tags: list[str] | None = option(None, SAFE)
    """Tags of the Comet experiment."""


@dataclass
class ProfilingConfig(ConfigPart):
    """What is profiled, and what the allocator of CUDA records."""

    use_pytorch_profiler: bool = option(False, SAFE)
    """Write a trace of torch's profiler, `torch_profile/rank-<r>.json.gz` beside `logger.tensorboard_dir` or in the
    run's folder, of the steps after `profile_step_start` up to `profile_step_end`."""
    use_nsys_profiler: bool = option(False, SAFE)
    """Mark the same steps for `nsys profile -c cudaProfilerApi`."""
    profile_step_start: int = option(10, SAFE, bound=">= 0")
    """Steps that are done before a profile begins."""
    pytorch_profiler_collect_shapes: bool = option(False, SAFE)
    """Keep the shapes of operands in torch's trace."""
    pytorch_profiler_collect_callstack: bool = option(False, SAFE)
    """Keep Python's stack in torch's trace."""
    pytorch_profiler_collect_chakra: bool = option(False, SAFE)
    """Write torch's execution trace too, `chakra/rank-<r>.json.gz`."""
    record_shapes: bool = option(False, SAFE)
    """Keep shapes in the ranges that nsys sees."""
    nvtx_ranges: bool = option(False, SAFE)
    """Name each step, its forward and backward passes and its update for nsys; takes a GPU."""
    record_memory_history: bool = option(False, SAFE)
    """Record CUDA's allocations, for a snapshot at `profile_step_end` and when memory runs out."""
    memory_snapshot_path: str = option("snapshot.pickle", SAFE)
    """Where snapshots go; the rank is put before the suffix."""
    profile_step_end: int = option(12, SAFE, bound="> 0")
    """Step after which a profile ends and the snapshot is written."""
    profile_ranks: list[int] = option([0], SAFE)
    """Ranks that profile and record; empty is all for profiles, and none for memory."""


TRACKERS = ("csv", "tensorboard", "wandb", "mlflow", "comet", "trackio")

ALL = "all"
"""Every tracker whose package is installed."""

ALIASES = {"comet_ml": "comet"}
"""Hugging Face's names that are others here."""

BRIDGE_FIELDS = {
    "tensorboard": "tensorboard_dir",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment",
    "comet": "comet_project",
}
"""The fields of `logger` that ask for a tracker of Megatron Bridge's tags, where `report_to` does not name it."""

NAMES = ("hf", "bridge")
"""What `report_names` takes: Hugging Face's names, Megatron Bridge's tags."""

DEFAULT_PROJECT = "huggingface"
"""`TrainingArguments.project` unless it is set: the tracker's own default then."""


def tracker_list(report_to: str | Sequence[str] | None, field: str) -> list[str]:
    """`report_to` as a list of trackers without repetitions: [] for none, ["all"] for all that are installed.

    Raises:
        ConfigError: naming the field, the unknown name and the nearest known one.
    """
    given = [report_to] if isinstance(report_to, str) else list(report_to or [])
    names = list(dict.fromkeys(ALIASES.get(name, name) for name in given))
    for name in names:
        if name not in (*TRACKERS, ALL, "none"):
            known = ", ".join(TRACKERS)
            hint = nearest(str(name), [*TRACKERS, *ALIASES, ALL])
            raise ConfigError(f"{field}={name!r} is no tracker; use 'none', 'all' or some of {known}.{hint}")
    if "none" in names and len(names) > 1:
        raise ConfigError(f"{field}={names!r} has 'none' beside trackers; drop one or the other.")
    if ALL in names:
        return [ALL]
    return [] if names == ["none"] else names


def name_list(report_names: str | Sequence[str] | None, field: str = "logger.report_names") -> tuple[str, ...] | None:
    """`report_names` without repetitions; None where it is not set.

    Raises:
        ConfigError: for an unknown name, and for none at all.
    """
    if report_names is None:
        return None
    names = tuple(dict.fromkeys([report_names] if isinstance(report_names, str) else report_names))
    if not names or not set(names) <= set(NAMES):
        raise ConfigError(
            f"{field}={list(names)!r} must be some of {', '.join(NAMES)}; unset, trackers of "
            f"logger.report_to show hf, those of logger.{BRIDGE_FIELDS['wandb']} and its like bridge."
        )
    return names
