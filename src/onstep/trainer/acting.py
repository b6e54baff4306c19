"""Calls an overridden `_maybe_log_save_evaluate`, which may log, evaluate and save by itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from onstep.train_state import StateDict
from onstep.trainer.feature import TrainerFeature
from onstep.training.compute.step import Step
from onstep.training.run import Run
from onstep.training.stages.actions import may_exit, save_and_exit_if_due
from onstep.training.stages.agreement import agree
from onstep.training.stages.exits import (
    CurrentEvaluation,
    EvaluationInterrupted,
    random_state_before,
    restore_random_state,
    save_and_decide_exit,
)
from onstep.training.stages.job import Job
from onstep.training.stages.record import read_interval

_DUE = ("should_log", "should_evaluate", "should_save")


class Acting:
    """Calls a Trainer's `_maybe_log_save_evaluate` after each step and epoch, with the arguments of Hugging Face's."""

    def __init__(self, trainer: Any, run: Run) -> None:
        self._trainer, self._run = trainer, run
        self._loss = trainer._tr_loss = torch.zeros((), device=run.world.device)
        trainer._total_loss_scalar, trainer._globalstep_last_logged = 0.0, run.train_state.step
        self._logged_at = run.train_state.step
        """The step of the last record that the loop knows of."""

    def state_dict(self) -> StateDict:
        """The losses since the last record, and its step."""
        trainer = self._trainer
        return {
            "loss": self._loss,
            "total": float(trainer._total_loss_scalar),
            "last_logged": int(trainer._globalstep_last_logged),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with them."""
        self._loss.copy_(state_dict["loss"])
        self._trainer._total_loss_scalar = state_dict["total"]
        self._logged_at = self._trainer._globalstep_last_logged = state_dict["last_logged"]

    def add(self, step: Step) -> None:
        """Add the loss of a step, which is the same on all ranks."""
        self._loss += step.total.value().to(self._loss)

    def act(self, job: Job, do_due: Callable[[Job], object], rate: float | None) -> None:
        """Call the method, and settle what it has done without `super()`. Collective."""
        trainer, run, control = self._trainer, self._run, job.run.control
        step = run.train_state.step
        is_due = any(getattr(control, flag) for flag in _DUE)
        if not is_due and not run.stage.has_stepped:  # a run that continues, with nothing pending
            do_due(job)
            return
        random_state = random_state_before(run) if control.should_evaluate else None
        run.features.renew(CurrentEvaluation)
        trainer.do_due, trainer.write_checkpoint = lambda: self._do_due(job, do_due), lambda: self._save(job)
        is_interrupted = False
        feature = run.features.find(TrainerFeature)
        assert feature is not None
        try:
            with feature.saving_to(os.path.join(trainer._get_output_dir(trainer._trial), f"checkpoint-{step}")):
                trainer._maybe_log_save_evaluate(
                    self._loss,
                    None if job.last is None else job.last.grad_norm,
                    trainer.session.model[0],
                    trainer._trial,
                    _epoch(run),
                    trainer.session.ignore_keys,
                    feature.started,
                    learning_rate=rate,
                )
        except EvaluationInterrupted:
            is_interrupted = True
            restore_random_state(run, random_state)
        finally:
            trainer.has_fired_on_save = False
            trainer.do_due = trainer.write_checkpoint = None
        self._settle(job)
        if is_due:
            for flag in _DUE[: 1 if is_interrupted else 3]:
                control.clear(flag)
            agree(run)
        if may_exit(job):
            save_and_exit_if_due(job)

    def _do_due(self, job: Job, do_due: Callable[[Job], object]) -> None:
        """What `super()` does."""
        trainer, step = self._trainer, self._run.train_state.step
        if job.run.control.should_log:
            trainer._total_loss_scalar += float(self._loss)
            trainer._globalstep_last_logged = self._logged_at = step
            self._loss.zero_()
        do_due(job)

    def _settle(self, job: Job) -> None:
        """Count the tokens and losses up to a record that the method has logged itself. Collective."""
        if self._trainer._globalstep_last_logged != self._logged_at:
            self._logged_at = self._trainer._globalstep_last_logged
            self._run.control.clear("should_log")
            read_interval(self._run, job.accumulator)

    def _save(self, job: Job) -> None:
        """Write a checkpoint now, through the user's method that saves: it has been called."""
        run, trainer = self._run, self._trainer
        feature = run.features.find(TrainerFeature)
        assert feature is not None
        feature.writes_directly = True
        self._settle(job)
        if run.evaluated.at_step == run.train_state.step:
            run.control.clear("should_evaluate")
        try:
            run.control.set_due(log=False, evaluate=False, save=True)
            run.features.settle()
            flops = run.train_state.floating_point_operations_so_far
            save_and_decide_exit(run, job.trained, job.reader, flops)
        finally:
            feature.writes_directly = False
        trainer.has_fired_on_save = True


def _epoch(run: Run) -> int:
    """The epoch of the last step."""
    progress = run.train_state
    return progress.epoch - int(progress.steps_in_epoch == 0 and progress.epoch > 0)
