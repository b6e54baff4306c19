"""Trainers that override how parts of a checkpoint are saved and loaded, as libraries do."""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from onstep import Trainer, TrainerCallback
from tests.support.small_models import arguments, regression_rows

OPTIONS: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "num_train_epochs": 2,
    "logging_steps": 1,
    "save_strategy": "steps",
    "save_steps": 2,
}


class Noisy(nn.Module):
    """Its dropout needs the random state, its optimizer has moments."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(nn.functional.dropout(self.layer(x), 0.5, self.training)).squeeze(-1)
        return {"logits": logits} if labels is None else {"loss": (logits - labels).square().mean(), "logits": logits}


class Killed(Exception):
    """Ends a training as abruptly as a test can."""


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise Killed


def trained(cls: Any, directory: Path, kill_at: int | None = None, **options: Any) -> Any:
    """A Trainer after its training, which ends before step `kill_at + 1` as abruptly as a test can."""
    rows = regression_rows(8)
    trainer = cls(
        Noisy(),
        arguments(directory, **{**OPTIONS, **options}),
        train_dataset=rows,
        eval_dataset=rows,
        default_callbacks=False,
        callbacks=[] if kill_at is None else [Kill(kill_at)],
    )
    with suppress(Killed):
        trainer.train()
        assert kill_at is None
    return trainer


def weights(trainer: Any) -> list[Any]:
    return [value.tolist() for value in trainer.model.state_dict().values()]


def losses(trainer: Any) -> list[float]:
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


class WithCoefficient(Trainer):
    """Keeps a value of its own beside the optimizer, as TRL's GRPO does."""

    coefficient = 1.0

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.coefficient *= 1.5
        return super().training_step(*args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        os.makedirs(output_dir, exist_ok=True)
        Path(output_dir, "coefficient.json").write_text(json.dumps(self.coefficient))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self.coefficient = json.loads(Path(checkpoint, "coefficient.json").read_text())


class OwnWeights(Trainer):
    """Writes and loads the weights in a layout of its own, as sentence-transformers does."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert output_dir is not None
        os.makedirs(output_dir, exist_ok=True)
        inner = {f"inner.{name}": value for name, value in self.model.state_dict().items()}
        save_file(inner, Path(output_dir, "model.safetensors"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str) -> None:  # type: ignore[override]
        inner = load_file(Path(resume_from_checkpoint, "model.safetensors"))
        self.model.load_state_dict({name.removeprefix("inner."): value for name, value in inner.items()})

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))


class OwnGenerators(Trainer):
    """Reads Hugging Face's file of the random state itself, as axolotl does."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        args = self.args
        name = "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
        state = torch.load(Path(str(checkpoint), name), weights_only=False)
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])


class OwnOptimizer(Trainer):
    """Reads Hugging Face's files of optimizer and schedule itself."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.optimizer.load_state_dict(torch.load(Path(str(checkpoint), "optimizer.pt")))
        self.lr_scheduler.load_state_dict(torch.load(Path(str(checkpoint), "scheduler.pt")))


class LogsItself(Trainer):
    """Logs, evaluates and saves itself, without `super()`, as TRL's online DPO does."""

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: Any, trial: Any, epoch: Any, ignore: Any, start: Any, **kwargs: Any
    ) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            value = tr_loss.item()
            tr_loss -= tr_loss
            steps = self.state.global_step - self._globalstep_last_logged
            self._total_loss_scalar += value
            self._globalstep_last_logged = self.state.global_step
            self.log({"loss": value / steps, "mine": 1.0, "learning_rate": kwargs["learning_rate"]}, start)
        if self.control.should_evaluate:
            metrics = self._evaluate(trial, ignore)
            self._determine_best_metric(metrics=metrics, trial=trial)
        if self.control.should_save:
            self._save_checkpoint(model, trial)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)


class OwnSteps(Trainer):
    """Overrides the methods of a step, each of which calls `super()`."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _clip_grad_norm(self, model: Any) -> Any:
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(model, grad_norm)

    def _get_learning_rate(self) -> float:
        return super()._get_learning_rate()

    def _track_num_input_tokens(self, inputs: Any) -> None:
        super()._track_num_input_tokens(inputs)


class AllOfThem(WithCoefficient, OwnWeights, OwnGenerators, LogsItself, OwnSteps):
    """Overrides all of it."""
