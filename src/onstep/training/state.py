"""The state of a run: its configuration, progress, ranks and control, in one object that callbacks are handed."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from onstep.config import ConfigContainer, config_to_args
from onstep.distributed import World
from onstep.events import Control, Request, RunFacts, TrainerState
from onstep.optim import FiniteGate
from onstep.progress import TrainState

Reason = Literal["completed", "stopped", "preempted", "failed"]
"""How a run ends."""


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
    """Micro-batches of one step on one rank."""
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
    gate: FiniteGate | None = None
    """What watches the losses and gradients of an optimizer that has no gate of its own."""
    last_step_loss: Any = None
    """`StepLoss` of the step that just ran; the interval meter takes it up."""
    last_micros: Any = None
    """`MicroLoss`es of the step that just ran."""
    last_interval: Any = None
    """`IntervalReport` of the steps after the last logged one, when training has ended."""
    loss_sum: float = 0.0
    loss_steps: int = 0
    warned_of_saving: bool = False
    data_exhausted: bool = False
    evaluates_last_step: bool = False
    """The last step is evaluated inside the loop, due or not, as Hugging Face's Trainer does with `eval_steps`."""
    last_metrics: dict[str, Any] = field(default_factory=dict)
    """Metrics of the evaluation that just ran."""
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
    def nominal_step_size(self) -> float:
        """About the labels of one step; keeps summed losses near 1 until their true weight is known.

        The same on all ranks, and a power of two, so that scaling by it costs no precision.
        """
        labels = (self.cfg.train.global_batch_size or 1) * self.cfg.model.seq_length
        return float(2 ** round(math.log2(labels)))

    @property
    def train_iters(self) -> int | None:
        """Optimizer steps of the run, also of one that is configured in epochs or samples; None is no limit."""
        configured = self.cfg.train.train_iters
        return configured if configured is not None else self.facts.max_steps or None

    def mean_loss(self) -> float:
        """Mean loss of the steps of this `train()`; NaN before the first is reported."""
        return self.loss_sum / self.loss_steps if self.loss_steps else float("nan")

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of a forward pass: bfloat16 autocast over float32 weights, or nothing."""
        if self.cfg.mixed_precision is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16)
