"""Defines what an entry point gives to the run that it opens: objects for callbacks, and what its user may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from onstep.config import ConfigContainer
from onstep.config.checks import idle_without_trainer
from onstep.training.runs.identity import Identity


@dataclass
class EntryPoint:
    """The entry point of a run that is configured by keys; another one overrides its rules, and says what to set."""

    trainer: object = None
    """The `Trainer`, for callbacks."""
    processing_class: object = None
    train_dataloader: object = None
    eval_dataloader: object = None
    fire: Callable[..., None] = lambda event, **fields: None
    """Fires the events of the run's end."""
    forward_step_func: object = None
    """The forward step as the user passed it; its state is saved if it has one."""

    accepts_changes: ClassVar[bool] = False
    """Whether a run continues from another run's checkpoint though data or settings of what is learned differ."""
    names_loss: ClassVar[bool] = False
    """Whether it has logged what the losses are, and how they are weighted."""
    new_run: ClassVar[str] = "run.fresh=true"
    """What starts again from step 0."""
    new_place: ClassVar[str] = "another run.name"
    """What starts another run."""
    best_metric: ClassVar[str] = "validation.metric_for_best_model"

    def idle_settings(self, config: ConfigContainer) -> list[tuple[str, list[str]]]:
        """Settings without effect, by what they require."""
        return idle_without_trainer(config)

    def identify(self, config: ConfigContainer) -> Identity | None:
        """What the run trains on; None for data that is not configured."""
        return None

    def exported_states(self) -> dict[str, Any]:
        """The states of the callbacks in Hugging Face's view of the progress."""
        return {}

    def without_optimizer(self, checkpoint: Path) -> str:
        """What continues from a checkpoint without its optimizer."""
        return f"checkpoint.load={checkpoint} with checkpoint.load_optim=false"

    def from_weights(self, checkpoint: Path) -> str:
        """What starts a run from the weights of a checkpoint."""
        return f"{self.new_run} checkpoint.finetune=true checkpoint.pretrained_checkpoint={checkpoint}"

    def without_commands(self, directory: Path, step: int) -> str:
        """What continues a run without the commands that it was sent from a step on."""
        return (
            f"`onstep train {directory} --without-commands-from {step}`, or run.without_commands_from={step} in the "
            f"configuration"
        )
