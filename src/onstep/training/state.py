"""The state of a run: its configuration, progress, ranks and control, in one object that callbacks are handed."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from onstep.config import ConfigContainer, config_to_args
from onstep.config.batch_sizes import batch_sizes
from onstep.distributed import World
from onstep.events import Control, Request, RunFacts, TrainerState
from onstep.optim import FiniteGate, LossScaler, TrainingOptimizer, build_loss_scaler
from onstep.progress import TrainState
from onstep.training.clock import Clock
from onstep.training.energy import EnergyMonitor
from onstep.training.exits import ExitWatch
from onstep.training.fault_tolerance_state import FaultToleranceState
from onstep.training.microbatches_calculator import NumMicroBatchesCalculator
from onstep.training.nvrx_straggler import NVRxStragglerDetectionManager, nvrx_manager_of
from onstep.training.nvtx import NvtxRanges
from onstep.training.param_sync import ForwardPreHooks
from onstep.training.rerun import RerunStateMachine
from onstep.training.stragglers import NoStragglerTimer, StragglerDetector, straggler_timer_of
from onstep.training.timers import Timers
from onstep.training.trackers import Trackers

if TYPE_CHECKING:
    from onstep.training.certificate import Certificate
    from onstep.training.checkpointing import RunCheckpoints
    from onstep.training.watchdog import Watchdog

_AUTOCAST = {"bf16_mixed": torch.bfloat16, "fp16_mixed": torch.float16}

Reason = Literal["completed", "stopped", "preempted", "failed"]
"""How a run ends."""


@lru_cache(maxsize=64)
def _power_of_two(labels: int) -> float:
    return float(2 ** round(math.log2(labels)))


@dataclass
class GlobalState:
    """Everything of one run that is neither model, optimizer, scheduler nor data."""

    cfg: ConfigContainer
    """The validated copy that the run works with."""
    world: World = field(default_factory=World)
    train_state: TrainState = field(default_factory=TrainState)
    control: Control = field(default_factory=Control)
    facts: RunFacts = field(default_factory=RunFacts)
    num_microbatches: int = 1
    """Micro-batches of the current step on one rank; `batch_sizes` moves it where the batch grows."""
    num_eval_microbatches: int = 1
    flops_per_token: float = 0.0
    """Floating-point operations of training on one token: 6 for each parameter outside the embeddings.
    Source: Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section 2.1."""
    tokenizer: Any = None
    run_folder: Any = None
    trainer: Any = None
    processing_class: Any = None
    train_dataloader: Any = None
    eval_dataloader: Any = None
    given_args: Any = None
    """`TrainingArguments` as the user of `Trainer` gave them."""
    prints_console_line: bool = False
    """Megatron Bridge's lines of logged steps are wanted: no callback shows progress."""
    clock: Clock = field(default_factory=Clock)
    is_logged_step: bool | None = None
    """Whether the step that just ended is logged; the loop says so, since callbacks may ask for it or veto it. None:
    as `logger.log_interval` says."""
    interval_samples: int = 0
    """Samples since the last logged step."""
    start_step: int = 0
    """Step that this process continued from."""
    training_start_time: float = 0.0
    """Unix seconds when this process began to train."""
    gate: FiniteGate | None = None
    """What watches the losses and gradients of an optimizer that has no gate of its own."""
    last_step_loss: Any = None
    """`StepLoss` of the step that just ran; the interval meter takes it up."""
    max_attention_logit: Tensor | None = None
    """Largest attention logit of the step that just ran, over all ranks, 0-d; None unless
    `model.log_max_attention_logit`."""
    forward_pre_hooks: ForwardPreHooks | None = None
    """Hooks of somebody else's data parallelism that gather parameters in the forward pass; None for ours."""
    last_micros: Any = None
    """`MicroLoss`es of the step that just ran."""
    model_facts: Any = None
    """`ModelFacts` of the model that the last step trained; None before the first."""
    experts: Any = None
    """`ExpertSteps` of the model, also of one without experts; None before the first step."""
    last_interval: Any = None
    """`IntervalReport` of the steps after the last logged one, when training has ended."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    rerun_state_machine: RerunStateMachine = field(default_factory=RerunStateMachine)
    """Recomputes suspicious results, where `rerun_state_machine.rerun_mode` says so."""
    checkpoints: RunCheckpoints | None = None
    """None for a run without a folder for them."""
    exits: ExitWatch = field(default_factory=ExitWatch)
    """Signals and time limits; ranks agree on them."""
    loop_parts: dict[str, Any] = field(default_factory=dict)
    """What the loop remembers between steps, alike on all ranks; saved with every checkpoint."""
    rank_parts: dict[str, Any] = field(default_factory=dict)
    """The same, each rank its own."""
    process_groups: dict[str, Any] = field(default_factory=dict)
    """Process groups by the name that a `StateComponent` of the pattern PER_GROUP gives."""
    pre_wrap_hooks: Sequence[Any] = ()
    """The user's changes to the model before it is wrapped for data parallelism."""
    forward_step_func: Any = None
    """The forward step as the user gave it; its state is saved where it has one."""
    is_resumed: bool = False
    """Whether this process continues from a checkpoint."""
    has_stepped: bool = False
    """Whether this process has completed a step since it started."""
    is_unsaved: bool = False
    """Whether anything has changed since the newest checkpoint."""
    saves_at_end: bool = False
    """The training is at its end, where it saves anyway: a save that is due waits for that."""
    save_reason: str = ""
    """Why the newest checkpoint was begun."""
    error: str | None = None
    """What ended the run, where it failed."""
    evaluation_is_whole: bool = True
    """Nothing of the evaluation that runs was reported yet, so it may be given up and made again."""
    evaluated_at: int | None = None
    """Step of `last_metrics`."""
    epoch_is_open: bool = False
    """Between `on_epoch_start` and `on_epoch_end`."""
    was_concluded: bool = False
    """The final metrics of the training are logged."""
    certificate: Certificate | None = None
    """This rank's hash chain, with `checkpoint.certify`."""
    ended_by_anomaly: bool = False
    """The policy `stop` of the anomaly gate ended the run; the command line answers with exit code 1."""
    flops_at_start: float = 0.0
    """Floating-point operations of the run when this process started."""
    warned_of_saving: bool = False
    data_exhausted: bool = False
    evaluates_last_step: bool = False
    """The last step is evaluated inside the loop, due or not, as Hugging Face's Trainer does with `eval_steps`."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the evaluation that just ran."""
    watchdog: Watchdog | None = None
    """What ends the run when a rank hangs or fails; None outside of a run and with `ft.watchdog_seconds=None`."""
    first_failure: str | None = None
    """What the watchdog has found: which rank was first to fail or hang, and where."""
    section_limits: dict[str, float] = field(default_factory=dict)
    """Learned limits of standing still, in seconds, by the phase of the run."""
    rank_monitor_client: Any = None
    """What times the sections of the run: that of `nvidia-resiliency-ext`, our own, or None."""
    fault_tolerance_state: FaultToleranceState = field(default_factory=FaultToleranceState)
    in_run: bool = False
    """Inside a `RunScope`: somebody tells the end of the run."""
    train_started: bool = False
    train_ended: bool = False
    exception_told: bool = False
    was_stopped: bool = False
    """Whether a callback ended the run before its time."""
    stopped_by: Request | None = None
    """Who asked for the stop that is decided on, or that ended the training."""
    ended: Reason | None = None
    """How the run ended, as `on_run_end` told it."""
    interval_start: float = field(default_factory=time.perf_counter)
    """Seconds on the monotonic clock when the current logging interval began."""
    start_time: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.training_start_time = self.start_time

    @cached_property
    def trainer_state(self) -> TrainerState:
        """Hugging Face's view of the progress."""
        return TrainerState(self.train_state, self.facts)

    @cached_property
    def args(self) -> Any:
        """Hugging Face's view of the configuration."""
        if self.given_args is not None:
            return self.given_args
        return config_to_args(self.cfg, world_size=self.world.size)

    @cached_property
    def nvtx(self) -> NvtxRanges:
        """Names parts of a step for Nsight Systems, where `profiling.nvtx_ranges` says so."""
        return NvtxRanges(self.cfg.profiling.nvtx_ranges, self.world.device.type == "cuda")

    @cached_property
    def batch_sizes(self) -> NumMicroBatchesCalculator | None:
        """The size of the current step; None where the configuration names no batch, as for a hand-made state."""
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
        """Samples that the current step takes over all ranks, as a whole one."""
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
    def straggler_timer(self) -> StragglerDetector | NoStragglerTimer:
        """Stands around the reading of batches and the forward passes; does nothing unless
        `straggler.log_straggler`."""
        return straggler_timer_of(self)

    @cached_property
    def energy_monitor(self) -> EnergyMonitor | None:
        """The energy of the GPUs; None unless `logger.log_energy`."""
        return EnergyMonitor(self.world) if self.cfg.logger.log_energy else None

    @cached_property
    def nvrx_straggler_manager(self) -> NVRxStragglerDetectionManager | None:
        """The detection of `nvidia-resiliency-ext`; None unless `nvrx_straggler.enabled`."""
        return nvrx_manager_of(self)

    @cached_property
    def trackers(self) -> Trackers:
        """Where Megatron Bridge's tags go."""
        return Trackers(self.cfg, self.world, self.run_folder, self.clock.wall)

    @property
    def tensorboard_logger(self) -> Any:
        """TensorBoard, with `add_scalar`; None where `logger.tensorboard_dir` is not set, and on all ranks but the
        last. Any object with that method may be put in its place, as for the other three."""
        return self.trackers.get("tensorboard")

    @tensorboard_logger.setter
    def tensorboard_logger(self, logger: Any) -> None:
        self.trackers.put("tensorboard", logger)

    @property
    def wandb_logger(self) -> Any:
        """W&B, with `log`; None without `logger.wandb_project`."""
        return self.trackers.get("wandb")

    @wandb_logger.setter
    def wandb_logger(self, logger: Any) -> None:
        self.trackers.put("wandb", logger)

    @property
    def mlflow_logger(self) -> Any:
        """MLflow, with `log_metrics`; None without `logger.mlflow_experiment`."""
        return self.trackers.get("mlflow")

    @mlflow_logger.setter
    def mlflow_logger(self, logger: Any) -> None:
        self.trackers.put("mlflow", logger)

    @property
    def comet_logger(self) -> Any:
        """Comet, with `log_metrics`; None without `logger.comet_project`."""
        return self.trackers.get("comet")

    @comet_logger.setter
    def comet_logger(self, logger: Any) -> None:
        self.trackers.put("comet", logger)

    def mean_loss(self) -> float:
        """Mean loss of the steps of this `train()`; NaN before the first is reported."""
        return self.loss_sum / self.loss_steps if self.loss_steps else float("nan")

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of a forward pass: bfloat16 or float16 autocast over float32 weights, or nothing."""
        if self.cfg.mixed_precision is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=_AUTOCAST[self.cfg.mixed_precision])

    @cached_property
    def foreign_scaler(self) -> LossScaler | None:
        """What scales the loss for an optimizer that has no scaler of its own; None for any precision but float16."""
        return build_loss_scaler(self.cfg.optimizer, self.cfg.mixed_precision)

    def loss_scaler(self, optimizer: Any) -> LossScaler | None:
        """What scales the loss for `optimizer`: a `TrainingOptimizer`'s own, which it is given where it lacks one."""
        if not isinstance(optimizer, TrainingOptimizer):
            return self.foreign_scaler
        if optimizer.scaler is None and self.foreign_scaler is not None:
            optimizer.scaler = self.foreign_scaler
        return optimizer.scaler
