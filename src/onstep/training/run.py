"""Defines a run: its configuration, ranks, progress and control, and its components."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch

from onstep.config import ConfigContainer, config_to_args
from onstep.config.lengths import batch_sizes
from onstep.distributed import World, existing_world
from onstep.events import Control, RunInfo, RunState
from onstep.optim import LossScaler, TrainingOptimizer, build_loss_scaler
from onstep.record.kinds import FILE_NAME, Kind
from onstep.train_state import TrainState
from onstep.training.entry_point import EntryPoint
from onstep.training.feature import Features
from onstep.training.protocols import Checkpoints, Metrics, UserOptimizer
from onstep.training.reporting.bridge_trackers import BridgeTrackers
from onstep.training.reporting.log_interval import LogInterval
from onstep.training.reporting.run_record import RunRecord
from onstep.training.reporting.timers import Clock, Timers
from onstep.training.reporting.training_losses import TrainingLosses
from onstep.training.runs.exit_watch import ExitWatch
from onstep.training.runs.microbatches import NumMicroBatchesCalculator
from onstep.training.runs.run_dir import RunDir
from onstep.training.runs.stage import RunEnding, RunStage

_NOBODY = -1
"""An empty rank."""
_AUTOCAST = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}


@dataclass
class EvaluationRecord:
    """The most recent evaluation."""

    last_metrics: Metrics = field(default_factory=dict)
    at_step: int | None = None
    """Step of `last_metrics`."""
    due_at_step: int = 0
    """The latest step at which an interval or epoch, rather than a request or the end, asked for an evaluation."""


@lru_cache(maxsize=64)
def _power_of_two(labels: int) -> float:
    return float(2 ** round(math.log2(labels)))


def _logger_of(tracker: str) -> property:
    return property(
        lambda run: run.bridge_trackers.get(tracker), lambda run, logger: run.bridge_trackers.put(tracker, logger)
    )


@dataclass
class Run:
    """A run. The state of a feature is kept in `features`, that of one step in its `Step`."""

    cfg: ConfigContainer = field(default_factory=ConfigContainer)
    """The validated copy that the run uses."""
    world: World = field(default_factory=existing_world)
    """The ranks of the process group, if there is one already; `World()` is this process by itself."""
    train_state: TrainState = field(default_factory=TrainState)
    control: Control = field(default_factory=Control)
    info: RunInfo = field(default_factory=RunInfo)
    num_microbatches: int = 1
    """Micro-batches of the current step on one rank; `batch_sizes` updates it if the batch size is ramped up."""
    num_eval_microbatches: int = 1
    run_dir: RunDir | None = None
    checkpoints: Checkpoints | None = None
    """None for a run without a checkpoint directory."""
    clock: Clock = field(default_factory=Clock)
    exits: ExitWatch = field(default_factory=ExitWatch)
    """Signals and time limits; ranks agree on them."""
    features: Features = field(default_factory=Features)
    """The optional features of the run."""
    ending: RunEnding = field(default_factory=RunEnding)
    stage: RunStage = field(default_factory=RunStage)
    evaluated: EvaluationRecord = field(default_factory=EvaluationRecord)
    entry_point: EntryPoint = field(default_factory=EntryPoint)
    flops_per_token: float = 0.0
    """Floating-point operations of training on one token, as far as known: 6 for each parameter outside the embeddings.
    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1."""
    flops_at_start: float = 0.0
    """Floating-point operations of the run when this process started."""
    start_time: float = field(default_factory=time.time)
    autocasts_forward_only: bool = False
    """Whether the model's `forward` enters mixed precision itself, and its loss is computed in float32."""
    model_casts: bool = False
    """Whether the model in training or evaluation casts the weights that it gathers, in place of autocast."""

    def __post_init__(self) -> None:
        world = self.world
        self.control.rank = world.rank
        self.info.num_processes, self.info.rank, self.info.local_rank = world.data.size, world.rank, world.local_rank

    @property
    def is_resumed(self) -> bool:
        """Whether this process continues from a checkpoint."""
        return self.checkpoints is not None and self.checkpoints.is_loaded

    @property
    def losses(self) -> TrainingLosses:
        """The losses of the current or last training."""
        return self.features.room(TrainingLosses)

    @property
    def interval(self) -> LogInterval:
        """The current logging interval."""
        return self.features.room(LogInterval)

    @property
    def mark(self) -> tuple[object, ...]:
        """How far the run has come; the same on all ranks, and another one once there is something new to save."""
        state, stage = self.train_state, self.stage
        position = (state.step, state.consumed_train_samples, state.epoch, stage.epoch_is_open, state.num_rollbacks)
        return (*position, self.evaluated.at_step, stage.final_metrics_logged)

    @property
    def is_unsaved(self) -> bool:
        """Whether anything has changed since the newest checkpoint."""
        return self.checkpoints is None or self.mark != self.checkpoints.saved_mark

    @property
    def prints_console_line(self) -> bool:
        """Whether to print Megatron Bridge's lines for logged steps."""
        return self.cfg.logger.console == "bridge"

    def begin_training(self) -> None:
        """Begin a training that nothing remains of: its stage, and its losses."""
        self.stage = RunStage()
        self.features.renew(TrainingLosses)

    @property
    def trainer(self) -> Any:
        """The `Trainer`; None for `pretrain`."""
        return self.entry_point.trainer

    @property
    def processing_class(self) -> Any:
        """The tokenizer, or any other object that `Trainer` was given to prepare data."""
        return self.entry_point.processing_class

    @property
    def tokenizer(self) -> Any:
        """The same, under the name that Megatron Bridge has for it."""
        return self.entry_point.processing_class

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.entry_point.processing_class = tokenizer

    @property
    def train_dataloader(self) -> Any:
        """The loader of the training data; None before it is opened."""
        return self.entry_point.train_dataloader

    @property
    def eval_dataloader(self) -> Any:
        """The loader of the validation data; None without any."""
        return self.entry_point.eval_dataloader

    @cached_property
    def trainer_state(self) -> RunState:
        """Hugging Face's view of the progress."""
        return RunState(self.train_state, self.info, lambda: self.control, self._exported_states, self._append)

    def _append(self, kind: Kind, data: Mapping[str, Any]) -> None:
        """Append a callback's line to the record, and its metrics to `log_history`."""
        if self.world.is_main and kind in ("log", "evaluation", "test"):
            self.info.history.append({**data, "step": self.train_state.step})
        self.note(kind, data)

    def _exported_states(self) -> dict[str, Any]:
        return self.entry_point.exported_states() | {"TrainerControl": self.control.state()}

    @cached_property
    def args(self) -> Any:
        """Hugging Face's view of the configuration; `Trainer` sets those that it was given."""
        args, run = config_to_args(self.cfg, world_size=self.world.data.size), self.cfg.run
        if run.is_in_store:  # callbacks write to the directory that is mirrored
            args.output_dir = str(run.local_output_dir / (run.name or ""))
        return args

    @cached_property
    def timers(self) -> Timers:
        """Time spent in the parts of the run, in seconds; `logger.timing_log_level` selects which are measured."""
        options = self.cfg.logger
        return Timers(
            options.timing_log_level,
            options.timing_log_option,
            world=self.world,
            clock=lambda: self.clock.elapsed(),  # a test may replace the clock later
        )

    @cached_property
    def bridge_trackers(self) -> BridgeTrackers:
        """The trackers that Megatron Bridge's tags are written to."""
        bridge_trackers = BridgeTrackers(self.cfg, self.world, self.run_dir, self.clock.wall, self)
        self.info.bridge_tags = bridge_trackers.record
        return bridge_trackers

    tensorboard_logger = _logger_of("tensorboard")
    """TensorBoard, with `add_scalar`; None if `logger.tensorboard_dir` is not set, and on all ranks but the last.
    Any object with that method can replace it, and likewise the other three."""
    wandb_logger = _logger_of("wandb")
    """W&B, with `log`; None without `logger.wandb_project`."""
    mlflow_logger = _logger_of("mlflow")
    """MLflow, with `log_metrics`; None without `logger.mlflow_experiment`."""
    comet_logger = _logger_of("comet")
    """Comet, with `log_metrics`; None without `logger.comet_project`."""

    @property
    def record(self) -> RunRecord:
        """What happens in the run, line by line; `note` appends to it."""
        return self.features.room(RunRecord)

    def note(self, kind: Kind, data: Mapping[str, Any], step: int | None = None) -> None:
        """Append a line to the record, on rank 0; `step` is by default the last one done.

        Args:
            kind: the kind of the line.
            data: its fields by name.
        """
        if self.world.is_main:
            at = self.train_state.step if step is None else step
            directory = None if self.run_dir is None else self.run_dir.path
            with self.world.main_only("a listener of the record", "use a callback's event in its place"):
                self.record.append(directory, kind, at, self.trainer_state.epoch, data)

    @property
    def record_path(self) -> Path | None:
        """The file of the record, on rank 0 of a run with a directory."""
        if self.run_dir is None or not self.world.is_main:
            return None
        path, directory = self.record.path, Path(self.run_dir.path)
        return path if path is not None and path.parent == directory else directory / FILE_NAME

    @cached_property
    def batch_sizes(self) -> NumMicroBatchesCalculator | None:
        """The size of the current step; None if the configuration has no batch size, as for a hand-made run."""
        train = self.cfg.train
        if train.micro_batch_size is None or train.global_batch_size is None:
            return None
        sizes = batch_sizes(train, self.world.data.size, self.cfg.model.seq_length)
        decreases = train.decrease_batch_size_if_needed
        return NumMicroBatchesCalculator(sizes, train.micro_batch_size, self.world.data.size, decreases)

    @property
    def current_global_batch_size(self) -> int:
        """Configured samples of the current step over all ranks; 1 if not configured."""
        sizes = self.batch_sizes
        return (self.cfg.train.global_batch_size or 1) if sizes is None else sizes.current_global_batch_size

    @property
    def current_running_global_batch_size(self) -> int:
        """Samples of the current step over all ranks, if it is a full one."""
        sizes = self.batch_sizes
        return (self.cfg.train.global_batch_size or 1) if sizes is None else sizes.current_running_global_batch_size

    @property
    def nominal_step_size(self) -> float:
        """Approximate number of labels in the current step; keeps summed losses near 1 until the weight is known.

        It is the same on all ranks, and a power of two, so that scaling by it costs no precision.
        """
        return _power_of_two(self.current_global_batch_size * self.cfg.model.seq_length)

    @property
    def train_iters(self) -> int | None:
        """Optimizer steps of the run, even if configured in epochs or samples; None means no limit."""
        configured = self.train_state.overrides.get("train_iters", self.cfg.train.train_iters)
        return configured if configured is not None else self.info.max_steps or None

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank prints the console line and writes to the trackers."""
        return self.world.rank == self.world.size - 1

    @property
    def has_all_steps(self) -> bool:
        """Whether the configured number of steps or epochs is done; an epoch that was ended early counts as one."""
        train, progress = self.cfg.train, self.train_state
        if train.num_epochs is not None and progress.epoch >= train.num_epochs:
            return True
        return (limit := self.train_iters) is not None and progress.step >= limit

    @property
    def is_over(self) -> bool:
        """Whether the run has done its steps, or its end was requested."""
        control = self.control
        if control.should_training_stop or control.should_abort_without_save or self.stage.data_exhausted:
            return True
        return self.exits.decided is not None or self.has_all_steps

    @property
    def has_unfinished_end(self) -> bool:
        """Whether it continues from after its last step, but before the evaluation, log or epoch end due there."""
        return self.is_resumed and not self.stage.final_metrics_logged and not self.leaves

    @property
    def leaves(self) -> bool:
        """Whether the ranks have decided that this process exits before the run is complete."""
        return self.exits.decided is not None

    def print_timers(self, names: Sequence[str], normalizer: float = 1.0) -> None:
        """Print times as Megatron Bridge does, on the last rank. Collective.

        Only with Megatron Bridge's lines, or with `logger.timing_log_level` above 0.

        Args:
            names: the names of the timers.
            normalizer: times are divided by it, such as the number of steps.
        """
        is_shown = self.prints_console_line or self.cfg.logger.timing_log_level > 0
        self.timers.log(names, rank=None if is_shown else _NOBODY, normalizer=normalizer)

    def mean_loss(self) -> float:
        """Mean loss of the steps of this `train()`; NaN before the first report."""
        return self.losses.mean

    def autocast(self) -> AbstractContextManager[object]:
        """The precision context of a forward pass and its loss; nothing where the model's `forward` has its own."""
        return nullcontext() if self.autocasts_forward_only else self.precision()

    def precision(self) -> AbstractContextManager[object]:
        """bfloat16 or float16 autocast over float32 weights; nothing where the model casts the weights it gathers."""
        if self.cfg.mixed_precision is None or self.model_casts:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=_AUTOCAST[self.cfg.mixed_precision])

    @cached_property
    def foreign_scaler(self) -> LossScaler | None:
        """The loss scaler for an optimizer without its own; None for any precision but float16."""
        return build_loss_scaler(self.cfg.optimizer, self.cfg.mixed_precision)

    def loss_scaler(self, optimizer: UserOptimizer | None) -> LossScaler | None:
        """The loss scaler for `optimizer`: a `TrainingOptimizer`'s own, if it is one."""
        return optimizer.scaler if isinstance(optimizer, TrainingOptimizer) else self.foreign_scaler
