"""The feature by which a run calls a Trainer's overridden methods of the loop where Hugging Face's calls them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from onstep.data import StepBatches
from onstep.errors import ConfigError
from onstep.optim import TrainingOptimizer
from onstep.record.kinds import Metrics
from onstep.trainer.acting import Acting
from onstep.trainer.overrides import overrides
from onstep.training.checkpointing.other_weights import other_weights
from onstep.training.compute.losses import as_scalar
from onstep.training.compute.step import Step, to_device
from onstep.training.feature import Feature
from onstep.training.run import Run
from onstep.training.stages.job import Job
from onstep.training.stages.record import RunStart

METHODS = (
    "get_batch_samples",
    "get_total_train_batch_size",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_get_learning_rate",
    "_maybe_log_save_evaluate",
)
"""The methods that it calls."""


class LoopMethods(Feature[Run]):
    """Calls a Trainer's overridden methods of a step, and of what is due after it."""

    name = "trainer_loop"
    when = "onstep.Trainer with overridden methods of its loop"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """In a training whose Trainer overrides one of them."""
        trainer = host.trainer
        if trainer is None or not trainer.session.trains:
            return False
        return any(overrides(trainer, name) for name in METHODS) or _may_train_other_weights(trainer)

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self._trainer = trainer = host.trainer
        self._session = trainer.session
        self._has = {name for name in METHODS if overrides(trainer, name)}
        self._measures = bool(self._has & {"_clip_grad_norm", "_get_grad_norm"})
        self._norm: Tensor | None = None
        self._rate: float | None = None
        self.acting = Acting(trainer, host) if "_maybe_log_save_evaluate" in self._has else None
        self.needs_grad_norm = self._measures
        self.has_state = self.acting is not None

    @property
    def stateful(self) -> Any:
        """What the next record is computed from."""
        return self.acting

    def begin(self) -> None:
        """Let an overridden method clip, in place of the optimizer of this training.

        transformers clips the model's weights only. In its place Onstep does so, too, where the optimizer has others,
        such as those of a loss of sentence-transformers.

        Raises:
            ConfigError: for an optimizer that clips by itself.
        """
        optimizer = self._session.optimizer
        if _may_train_other_weights(self._trainer) and other_weights(self._session.model, optimizer):
            self._has.add("_clip_grad_norm")
            self._measures = True
        if "_clip_grad_norm" not in self._has:
            return
        if not isinstance(optimizer, TrainingOptimizer):
            raise ConfigError(
                f"{type(self._trainer).__name__} overrides _clip_grad_norm, but {type(optimizer).__name__} clips the "
                f"gradients itself; set max_grad_norm=0 and clip in a callback's on_pre_optimizer_step."
            )
        optimizer.clip_grad = None

    # ---- a step

    def wrap_read(self, read: Callable[[], StepBatches | None]) -> Callable[[], StepBatches | None]:
        """The micro-batches of a step as `get_batch_samples` returns them. Collective."""
        if "get_batch_samples" not in self._has:
            return read

        def read_samples() -> StepBatches | None:
            batches = read()
            return None if batches is None else self._samples_of(batches)

        return read_samples

    def _samples_of(self, batches: StepBatches) -> StepBatches:
        trainer, device, number = self._trainer, self.host.world.device, len(batches.micro_batches)
        placed = [to_device(batch, device) for batch in batches.micro_batches]
        fillers = [one for one, is_filler in zip(placed, batches.is_filler, strict=True) if is_filler]
        trainer.fillers = tuple(fillers)
        iterator = iter(placed)
        samples, num_items = trainer.get_batch_samples(iterator, number, device)
        left, name = len(list(iterator)), f"{type(trainer).__name__}.get_batch_samples"
        if left:
            raise ConfigError(
                f"{name} has read {number - left} of the {number} micro-batches of a step; read them all."
            )
        if not samples:
            raise ConfigError(f"{name} returned no micro-batch for a step; return at least one.")
        self._session.forward_step.given_items = (num_items,)
        is_filler = [any(one is filler for filler in fillers) for one in samples]
        if len(samples) == number:
            return replace(batches, micro_batches=list(samples), is_filler=is_filler if fillers else batches.is_filler)
        return replace(batches, micro_batches=list(samples), is_filler=is_filler, sample_ids=None, local_samples=None)

    def before_update(self, step: Step) -> None:
        """Clip, and measure the norm, as the methods do."""
        trainer, optimizer = self._trainer, self._session.optimizer
        if not self._measures or getattr(optimizer, "overflowed", False):
            return
        model, clips = self._session.model[0], bool(trainer.args.max_grad_norm)
        norm: Tensor | float | None = step.grad_norm if clips else None
        if clips and "_clip_grad_norm" in self._has:
            norm = trainer._clip_grad_norm(model)
        if "_get_grad_norm" in self._has:
            norm = trainer._get_grad_norm(model, grad_norm=norm)
        self._norm = None if norm is None else as_scalar(norm, torch.float32, self.host.world.device)
        if self._norm is not None:
            step.grad_norm = self._norm

    def after_update(self, step: Step) -> None:
        """The norm that the methods return is the step's; the rate is that of this update."""
        if self._measures and step.grad_norm is not None and self._norm is not None:
            step.grad_norm = self._norm
        if "_get_learning_rate" in self._has:
            self._rate = float(self._trainer._get_learning_rate())

    def add_to_log(self, logs: Metrics) -> None:
        """The rate that `_get_learning_rate` has returned."""
        if self._rate is not None:
            logs["learning_rate"] = self._rate

    # ---- what is due after it

    def after_train_step(self, step: Step) -> None:
        """Add up the losses since the last record."""
        if self.acting is not None and not step.left_out:
            self.acting.add(step)

    def wrap_due(self, do_due: Callable[[Job], object]) -> Callable[[Job], object]:
        """What is due, through `_maybe_log_save_evaluate`. Collective."""
        acting = self.acting
        if acting is None:
            return do_due

        def act(job: Job) -> None:
            rate = self._rate
            if rate is None and job.last is not None:
                logs: Metrics = {}
                self.host.features.add_to_log(logs)
                rate = logs["learning_rate"]
            acting.act(job, do_due, rate)

        return act

    def wrap_final_metrics(self, measure: Callable[[Run, RunStart], Metrics]) -> Callable[[Run, RunStart], Metrics]:
        """The size of a step that `get_total_train_batch_size` returns."""
        if "get_total_train_batch_size" not in self._has:
            return measure

        def measured(run: Run, start: RunStart) -> Metrics:
            metrics, size = measure(run, start), int(self._trainer.get_total_train_batch_size(self._trainer.args))
            rate = metrics["train_steps_per_second"]
            return {**metrics, "effective_batch_size": size, "train_samples_per_second": round(rate * size, 3)}

        return measured


def _may_train_other_weights(trainer: Any) -> bool:
    """Whether an unmodified script has a loss of its own, which may have weights that are not the model's."""
    return trainer.follows_transformers and overrides(trainer, "compute_loss")
