"""A run: its configuration, ranks, progress and control, and what it is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from onstep.checkpoint import CheckpointInfo, CheckpointManager
from onstep.config import ConfigContainer, config_to_args
from onstep.config.lengths import batch_sizes
from onstep.data import StepSource
from onstep.distributed import World
from onstep.events import Control, Request, RunFacts, TrainerState
from onstep.models.heads import ModelHook
from onstep.optim import LossScaler, TrainingOptimizer, build_loss_scaler
from onstep.progress import TrainState
from onstep.training.feature import Features
from onstep.training.protocols import Metrics, Trained, UserOptimizer, UserScheduler
from onstep.training.reporting.bridge_trackers import Trackers
from onstep.training.reporting.timers import Clock, Timers
from onstep.training.runs.microbatches import NumMicroBatchesCalculator
from onstep.training.runs.run_dir import RunFolder
from onstep.training.runs.signals import ExitWatch

_NOBODY = -1
"""No rank."""
_AUTOCAST = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}

Reason = Literal["completed", "stopped", "preempted", "failed"]
"""How a run ends."""


@dataclass
class RunEnding:
    """Who has been told of the end of a run, and why it ended."""

    in_run: bool = False
    """Somebody fires the events of the end."""
    train_started: bool = False
    train_ended: bool = False
    exception_told: bool = False
    was_stopped: bool = False
    """Whether a callback ended the run before its time."""
    stopped_by: Request | None = None
    """Who asked for the stop that is decided on, or that ended the training."""
    by_anomaly: bool = False
    """The policy `stop` of the anomaly gate ended the run; the command line answers with exit code 1."""
    ended: Reason | None = None
    """How the run ended, as `on_run_end` was told."""
    error: str | None = None
    """What ended the run, where it failed."""
    first_failure: str | None = None
    """What the watchdog found: which rank was first to fail or hang, and where."""


@dataclass
class RunStage:
    """How far this process is within the run."""

    is_resumed: bool = False
    """Whether this process continues from a checkpoint."""
    has_stepped: bool = False
    """Whether this process has completed a step since it started."""
    epoch_is_open: bool = False
    """Between `on_epoch_start` and `on_epoch_end`."""
    data_exhausted: bool = False
    was_concluded: bool = False
    """The final metrics of the training are logged."""
    section_limits: dict[str, float] = field(default_factory=dict)
    """Learned limits of standing still, in seconds, by the timed section of the run."""


@dataclass
class SavingState:
    """What is known of the next checkpoint."""

    is_unsaved: bool = False
    """Whether anything has changed since the newest checkpoint."""
    saves_at_end: bool = False
    """The training is at its end, where it saves anyway: a save that is due waits for that."""
    save_reason: str = ""
    """Why the newest checkpoint was begun."""
    warned_of_saving: bool = False


@dataclass
class RunSums:
    """What the reports of a run are made of, beside the counters of its progress."""

    flops_per_token: float = 0.0
    """Floating-point operations of training on one token: 6 for each parameter outside the embeddings.
    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    flops_at_start: float = 0.0
    """Floating-point operations of the run when this process started."""
    start_step: int = 0
    """Step that this process continued from."""
    training_start_time: float = 0.0
    """Unix seconds when this process began to train."""
    interval_start: float = field(default_factory=time.perf_counter)
    """Seconds on the monotonic clock when the current logging interval began."""
    interval_samples: int = 0
    """Samples since the last logged step."""


@dataclass
class EvaluationRecord:
    """The evaluation that ran last."""

    last_metrics: Metrics = field(default_factory=dict)
    at_step: int | None = None
    """Step of `last_metrics`."""
    is_restartable: bool = True
    """Nothing of the evaluation that runs was reported yet, so it may be given up and made again."""


@dataclass
class Door:
    """What the door that opened the run has for callbacks, checkpoints and the console."""

    trainer: object = None
    processing_class: object = None
    train_dataloader: object = None
    eval_dataloader: object = None
    given_args: object = None
    """`TrainingArguments` as the user of `Trainer` gave them."""
    prints_console_line: bool = False
    """Megatron Bridge's lines of logged steps are wanted: no callback shows progress."""
    fire: Callable[..., None] = lambda event, **fields: None
    """Fires the events of the run's end."""
    evaluates_last_step: bool = False
    """The last step is evaluated inside the loop, due or not, as Hugging Face's Trainer does with `eval_steps`."""
    pre_wrap_hooks: Sequence[ModelHook] = ()
    """The user's changes to the model before it is wrapped for data parallelism."""
    forward_step_func: object = None
    """The forward step as the user gave it; its state is saved where it has one."""
    process_groups: dict[str, object] = field(default_factory=dict)
    """Process groups by the name that a `StateComponent` of the pattern PER_GROUP gives."""


class Checkpoints(Protocol):
    """What the loop needs of a run's checkpoints (`onstep.training.checkpointing.writing.RunCheckpoints`)."""

    @property
    def is_writing(self) -> bool: ...
    @property
    def root(self) -> Path: ...
    @property
    def manager(self) -> CheckpointManager: ...
    @property
    def start(self) -> CheckpointInfo | None: ...
    def check_states(self, trained: Trained) -> None: ...
    def load_progress(self, trained: Trained) -> None: ...
    def load_position(self, reader: StepSource, scheduler: UserScheduler | None = None) -> None: ...
    def restore(self, info: CheckpointInfo, trained: Trained) -> None: ...
    def save(self, trained: Trained, reader: StepSource, persistent: bool = True) -> None: ...
    def load_best_model(self, model: list[nn.Module]) -> None: ...
    def finalize_if_written(self) -> None: ...
    def finish(self) -> None: ...


@lru_cache(maxsize=64)
def _power_of_two(labels: int) -> float:
    return float(2 ** round(math.log2(labels)))


def _logger_of(tracker: str) -> property:
    return property(lambda run: run.trackers.get(tracker), lambda run, logger: run.trackers.put(tracker, logger))


@dataclass
class Run:
    """What a run is. What belongs to a feature is in the feature's room, what belongs to one step in its `Step`."""

    cfg: ConfigContainer
    """The validated copy that the run works with."""
    world: World = field(default_factory=World)
    train_state: TrainState = field(default_factory=TrainState)
    control: Control = field(default_factory=Control)
    facts: RunFacts = field(default_factory=RunFacts)
    num_microbatches: int = 1
    """Micro-batches of the current step on one rank; `batch_sizes` moves it where the batch grows."""
    num_eval_microbatches: int = 1
    tokenizer: Any = None
    run_folder: RunFolder | None = None
    checkpoints: Checkpoints | None = None
    """None for a run without a folder for them."""
    clock: Clock = field(default_factory=Clock)
    exits: ExitWatch = field(default_factory=ExitWatch)
    """Signals and time limits; ranks agree on them."""
    features: Features = field(default_factory=Features)
    """What the run does beside training."""
    ending: RunEnding = field(default_factory=RunEnding)
    stage: RunStage = field(default_factory=RunStage)
    saving: SavingState = field(default_factory=SavingState)
    sums: RunSums = field(default_factory=RunSums)
    evaluated: EvaluationRecord = field(default_factory=EvaluationRecord)
    door: Door = field(default_factory=Door)
    start_time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.sums.training_start_time = self.start_time

    @property
    def trainer(self) -> Any:
        """The `Trainer`; None under `pretrain`."""
        return self.door.trainer

    @property
    def processing_class(self) -> Any:
        """The tokenizer, or whatever else `Trainer` was given to prepare data."""
        return self.door.processing_class

    @property
    def train_dataloader(self) -> Any:
        """The loader of the training data; None before it is opened."""
        return self.door.train_dataloader

    @property
    def eval_dataloader(self) -> Any:
        """The loader of the validation data; None where there is none."""
        return self.door.eval_dataloader

    @cached_property
    def trainer_state(self) -> TrainerState:
        """Hugging Face's view of the progress."""
        return TrainerState(self.train_state, self.facts)

    @cached_property
    def args(self) -> Any:
        """Hugging Face's view of the configuration."""
        if self.door.given_args is not None:
            return self.door.given_args
        return config_to_args(self.cfg, world_size=self.world.size)

    @cached_property
    def timers(self) -> Timers:
        """Seconds that the parts of the run take; `logger.timing_log_level` says which are measured."""
        options = self.cfg.logger
        return Timers(
            options.timing_log_level,
            options.timing_log_option,
            world=self.world,
            clock=lambda: self.clock.elapsed(),  # a test may change the clock later
        )

    @cached_property
    def trackers(self) -> Trackers:
        """Where Megatron Bridge's tags go."""
        trackers = Trackers(self.cfg, self.world, self.run_folder, self.clock.wall)
        self.facts.bridge_tags = trackers.record
        return trackers

    tensorboard_logger = _logger_of("tensorboard")
    """TensorBoard, with `add_scalar`; None where `logger.tensorboard_dir` is not set, and on all ranks but the last.
    Any object with that method may be put in its place, as for the other three."""
    wandb_logger = _logger_of("wandb")
    """W&B, with `log`; None without `logger.wandb_project`."""
    mlflow_logger = _logger_of("mlflow")
    """MLflow, with `log_metrics`; None without `logger.mlflow_experiment`."""
    comet_logger = _logger_of("comet")
    """Comet, with `log_metrics`; None without `logger.comet_project`."""

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of training on one token, as far as they are known."""
        return self.sums.flops_per_token

    @cached_property
    def batch_sizes(self) -> NumMicroBatchesCalculator | None:
        """The size of the current step; None where the configuration names no batch, as for a hand-made run."""
        train = self.cfg.train
        if train.micro_batch_size is None or train.global_batch_size is None:
            return None
        sizes = batch_sizes(train, self.world.size, self.cfg.model.seq_length)
        decreases = train.decrease_batch_size_if_needed
        return NumMicroBatchesCalculator(sizes, train.micro_batch_size, self.world.size, decreases)

    @property
    def current_global_batch_size(self) -> int:
        """Configured samples of the current step over all ranks; 1 where the configuration does not say."""
        sizes = self.batch_sizes
        return (self.cfg.train.global_batch_size or 1) if sizes is None else sizes.current_global_batch_size

    @property
    def current_running_global_batch_size(self) -> int:
        """Samples of the current step over all ranks, as a whole one."""
        sizes = self.batch_sizes
        return (self.cfg.train.global_batch_size or 1) if sizes is None else sizes.current_running_global_batch_size

    @property
    def nominal_step_size(self) -> float:
        """About the labels of the current step; keeps summed losses near 1 until their true weight is known.

        The same on all ranks, and a power of two, so that scaling by it costs no precision.
        """
        return _power_of_two(self.current_global_batch_size * self.cfg.model.seq_length)

    @property
    def train_iters(self) -> int | None:
        """Optimizer steps of the run, also of one that is configured in epochs or samples; None is no limit."""
        configured = self.train_state.overrides.get("train_iters", self.cfg.train.train_iters)
        return configured if configured is not None else self.facts.max_steps or None

    @property
    def is_last_rank(self) -> bool:
        """Whether this rank prints the console line and fills the trackers."""
        return self.world.rank == self.world.size - 1

    @property
    def has_all_steps(self) -> bool:
        """Whether the configured number of steps is done, or of epochs: one that was ended early counts as one."""
        train, progress = self.cfg.train, self.train_state
        if train.num_epochs is not None and progress.epoch >= train.num_epochs:
            return True
        limit = progress.overrides.get("train_iters", train.train_iters)
        limit = limit if limit is not None else self.facts.max_steps or None
        return limit is not None and progress.step >= limit

    @property
    def is_over(self) -> bool:
        """Whether the run has its steps, or somebody asked for its end."""
        control = self.control
        if control.should_training_stop or control.should_abort_without_save or self.stage.data_exhausted:
            return True
        return self.exits.decided is not None or self.has_all_steps

    @property
    def leaves(self) -> bool:
        """Whether the ranks have decided that this process ends before the run is done."""
        return self.exits.decided is not None

    def print_timers(self, names: Sequence[str], normalizer: float = 1.0) -> None:
        """Print times as Megatron Bridge does, on the last rank. Collective.

        Where a callback shows progress, only if timers were asked for (`logger.timing_log_level` above 0).
        """
        is_shown = self.door.prints_console_line or self.cfg.logger.timing_log_level > 0
        self.timers.log(names, rank=None if is_shown else _NOBODY, normalizer=normalizer)

    def mean_loss(self) -> float:
        """Mean loss of the steps of this `train()`; NaN before the first is reported."""
        return self.sums.loss_sum / self.sums.loss_steps if self.sums.loss_steps else float("nan")

    def autocast(self) -> AbstractContextManager[object]:
        """The precision of a forward pass: bfloat16 or float16 autocast over float32 weights, or nothing."""
        if self.cfg.mixed_precision is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=_AUTOCAST[self.cfg.mixed_precision])

    @cached_property
    def foreign_scaler(self) -> LossScaler | None:
        """What scales the loss for an optimizer that has no scaler of its own; None for any precision but float16."""
        return build_loss_scaler(self.cfg.optimizer, self.cfg.mixed_precision)

    def loss_scaler(self, optimizer: UserOptimizer | None) -> LossScaler | None:
        """What scales the loss for `optimizer`: a `TrainingOptimizer`'s own."""
        return optimizer.scaler if isinstance(optimizer, TrainingOptimizer) else self.foreign_scaler
