"""Metrics that are reported, how often, and to which trackers."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.section import PATH, SAFE, Bound, ConfigSection, option
from onstep.config.sections.checkpoint import DIRECTORY
from onstep.config.trackers import ALL, BRIDGE_FIELDS, NAMES, TRACKERS

A_TRACKER = "logger.report_to"
BRIDGE_TAGS = "trackers that show Megatron Bridge's tags: logger.report_names=[bridge] with logger.report_to"
TO_TRACKER = {name: f"{A_TRACKER}=[{name}] or logger.{field}" for name, field in BRIDGE_FIELDS.items()}
_WANDB, _MLFLOW, _COMET = (TO_TRACKER[name] for name in ("wandb", "mlflow", "comet"))
_TIMING_LEVEL = Bound(
    "-1 (nothing), 0 (set-up, saves, evaluations), 1 (also the parts of a step) or 2 (also its micro-batches)",
    lambda level: -1 <= level <= 2,
)


@dataclass
class LoggerConfig(ConfigSection):
    """The metrics that are reported, how often, and to which trackers."""

    log_interval: int = option(
        100,
        SAFE,
        bound=">= 0",
        common=True,
        known_as=("logging_steps", "log_steps", "log_every"),
        help="Steps between logged steps; 0 disables logging.",
    )
    console: str = option(
        "default",
        SAFE,
        choices=("quiet", "default", "verbose", "bridge"),
        common=True,
        help="What is shown: quiet (warnings, and the end of the run) | default (rows and a summary) | verbose (every "
        "row also in a file, all sizes, messages for debugging) | bridge (Megatron Bridge's lines).",
    )
    log_first_step: bool = option(False, SAFE, hf="logging_first_step", help="Log step 1 too.")
    log_on_each_epoch: bool = option(False, SAFE, help="Log at the end of each epoch.")
    logging_level: int | None = option(
        None, SAFE, bound=">= 0", help="Level of the `onstep` logger; None leaves it unchanged."
    )
    logging_dir: str | None = option(
        None,
        SAFE,
        bound=PATH,
        hf="logging_dir",
        help="Where the metrics log and trackers write; None is the run's directory.",
    )
    log_progress: bool = option(
        False,
        SAFE,
        needs=DIRECTORY,
        help="Append starts and saves to `progress.txt` in the directory of the checkpoints.",
    )
    report_to: list[str] | str | None = option(
        None,
        SAFE,
        elements=(*TRACKERS, ALL),
        common=True,
        help=f"Trackers to report to, one or a list: {', '.join(TRACKERS)}.",
    )
    report_names: list[str] | str | None = option(
        None,
        SAFE,
        elements=NAMES,
        needs=A_TRACKER,
        help="Names of metrics in trackers, in one run each: hf (`train/loss`), bridge (`lm loss`), or both. None "
        "is hf for the trackers in `report_to`, and bridge for those that only `tensorboard_dir`, "
        "`wandb_project` and the like enable.",
    )
    log_params_norm: bool = option(False, SAFE, help="Report the L2 norm of all parameters.")
    log_throughput: bool = option(False, SAFE, help="Show TFLOP/s per device in Megatron Bridge's console line.")
    timing_log_level: int = option(
        0,
        SAFE,
        bound=_TIMING_LEVEL,
        help="What is timed: -1 nothing | 0 set-up, saves and evaluations | 1 also the phases of a step | 2 also "
        "its micro-batches. Levels 1 and 2 synchronize with the device, and print times at logged steps.",
    )
    timing_log_option: str = option(
        "minmax",
        SAFE,
        choices=("max", "minmax", "all"),
        needs="logger.timing_log_level >= 0",
        help="Which of the ranks' times are shown: max | minmax | all.",
    )
    log_energy: bool = option(
        False,
        SAFE,
        help="Report joules and watts of a GPU at logged steps, where NVIDIA's driver provides them (pynvml, of "
        "the extra `gpu`); elsewhere warn once.",
    )
    throughput_window_size: int = option(
        100,
        SAFE,
        bound="> 0",
        needs="logger.log_throughput_to_tensorboard=true",
        help="Steps over which the windowed throughput is measured.",
    )
    tensorboard_dir: str | None = option(
        None,
        SAFE,
        bound=PATH,
        help="TensorBoard's directory; without `report_to` it enables TensorBoard, with Megatron Bridge's tags.",
    )
    tensorboard_log_interval: int = option(
        1,
        SAFE,
        bound="> 0",
        needs=BRIDGE_TAGS,
        help="Steps between points of Megatron Bridge's tags, in every tracker.",
    )
    tensorboard_queue_size: int = option(
        1000, SAFE, bound="> 0", help="Accepted for Megatron Bridge; nothing that waits for a tracker is dropped."
    )
    log_throughput_to_tensorboard: bool = option(False, SAFE, needs=BRIDGE_TAGS, help="Report `throughput/...`.")
    log_timers_to_tensorboard: bool = option(
        False,
        SAFE,
        needs=BRIDGE_TAGS,
        help="Report `iteration-time`, and `<timer>-time` for the timers of `timing_log_level` 1 and 2.",
    )
    log_loss_scale_to_tensorboard: bool = option(True, SAFE, help="Report `loss-scale`.")
    log_validation_ppl_to_tensorboard: bool = option(
        False, SAFE, needs=BRIDGE_TAGS, help="Report the perplexity beside each validation loss."
    )
    log_memory_to_tensorboard: bool = option(
        False, SAFE, needs=BRIDGE_TAGS, help="Report `memory/...` of CUDA's allocator."
    )
    memory_keys: dict[str, str] | None = option(
        None,
        SAFE,
        needs="logger.log_memory_to_tensorboard=true",
        help="Statistics of CUDA's allocator and the names they are reported under; None is `MEMORY_KEYS`.",
    )
    log_l2_norm_grad_to_tensorboard: bool = option(
        False, SAFE, needs=BRIDGE_TAGS, help="Report `l2_norm/grad/<parameter>`."
    )
    log_runtime_to_tensorboard: bool = option(False, SAFE, needs=BRIDGE_TAGS, help="Report `time/...`.")
    runtime_time_unit: str = option(
        "hours",
        SAFE,
        choices=("seconds", "minutes", "hours", "days"),
        needs="logger.log_runtime_to_tensorboard=true",
        help="Unit of `time/...`: seconds | minutes | hours | days.",
    )
    log_world_size_to_tensorboard: bool = option(False, SAFE, needs=BRIDGE_TAGS, help="Report `world-size`.")
    skip_train_metrics_log: bool = option(False, SAFE, help="Omit Megatron Bridge's tags and console line of training.")
    wandb_project: str | None = option(
        None, SAFE, help="W&B project; without `report_to` it enables W&B, with Megatron Bridge's tags."
    )
    wandb_exp_name: str | None = option(None, SAFE, needs=_WANDB, help="Name of the W&B run; None is the run's.")
    wandb_save_dir: str | None = option(
        None, SAFE, bound=PATH, needs=_WANDB, help="Where W&B keeps its files; None is the run's directory."
    )
    wandb_entity: str | None = option(None, SAFE, needs=_WANDB, help="W&B user or team.")
    mlflow_experiment: str | None = option(
        None, SAFE, help="MLflow experiment; without `report_to` it enables MLflow, with Megatron Bridge's tags."
    )
    mlflow_run_name: str | None = option(None, SAFE, needs=_MLFLOW, help="Name of the MLflow run; None is the run's.")
    mlflow_tracking_uri: str | None = option(
        None, SAFE, needs=_MLFLOW, help="MLflow's store; None is `mlruns` in the run's directory."
    )
    mlflow_tags: dict[str, str] | None = option(None, SAFE, needs=_MLFLOW, help="Tags of the MLflow run.")
    mlflow_description: str | None = option(None, SAFE, needs=_MLFLOW, help="Note of the MLflow run.")
    comet_project: str | None = option(
        None, SAFE, help="Comet project; without `report_to` it enables Comet, with Megatron Bridge's tags."
    )
    comet_experiment_name: str | None = option(
        None, SAFE, needs=_COMET, help="Name of the Comet experiment; None is the run's."
    )
    comet_workspace: str | None = option(
        None, SAFE, needs=_COMET, help="Comet workspace; the key is read from the environment (`COMET_API_KEY`)."
    )
    comet_tags: list[str] | None = option(None, SAFE, needs=_COMET, help="Tags of the Comet experiment.")
