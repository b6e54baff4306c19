"""Defines what a `Trainer` gives to the run that it opens, and what its user may do about an error."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onstep.config import ConfigContainer
from onstep.events.exportable_state import exported_states
from onstep.train_state import StateDict
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.output_dir.identity import trainer_identity
from onstep.training.entry_point import EntryPoint
from onstep.training.runs.identity import Identity


@dataclass
class TrainerEntryPoint(EntryPoint):
    """The entry point of a run that is configured by `TrainingArguments`."""

    trainer: BaseTrainer
    """The Trainer, for callbacks."""

    accepts_changes: ClassVar[bool] = True
    """As in Hugging Face's Trainer; they are named."""
    names_loss: ClassVar[bool] = True
    new_run: ClassVar[str] = "resume_from_checkpoint=False"
    new_place: ClassVar[str] = "another output_dir"
    best_metric: ClassVar[str] = "TrainingArguments.metric_for_best_model"

    def idle_settings(self, config: ConfigContainer) -> list[tuple[str, list[str]]]:
        """None: the session of a training names them, which knows the model."""
        return []

    def identify(self, config: ConfigContainer) -> Identity:
        """What the Trainer was given to train, and on what."""
        return trainer_identity(self.trainer)

    def exported_states(self) -> StateDict:
        """The states of the Trainer's callbacks."""
        return exported_states(self.trainer.callback_manager.callbacks)

    def without_optimizer(self, checkpoint: Path) -> str:
        """What continues from a checkpoint without its optimizer."""
        return f"resume_from_checkpoint={str(checkpoint)!r} with config_overrides={{'checkpoint.load_optim': False}}"

    def from_weights(self, checkpoint: Path) -> str:
        """What starts a run from the weights of a checkpoint."""
        return f"{self.new_run} and a model that is loaded from {checkpoint}"

    def without_commands(self, directory: Path, step: int) -> str:
        """What continues a run without the commands that it was sent from a step on."""
        return f"config_overrides={{'run.without_commands_from': {step}}} in TrainingArguments"
