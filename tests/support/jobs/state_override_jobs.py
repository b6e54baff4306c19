"""Trainings of `tests.support.state_overrides` on several ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from onstep import Trainer
from tests.support import state_overrides
from tests.support.small_models import Regression, arguments, regression_rows
from tests.support.state_overrides import losses, trained, weights


def job_trains(settings: dict[str, Any]) -> Any:
    """Train in the working directory, and continue what is there; the weights and the losses."""
    cls = getattr(state_overrides, settings["name"])
    trainer = trained(cls, Path("runs"), settings["kill_at"], num_train_epochs=3)
    return [weights(trainer), losses(trainer)]


def job_killed_while_saving(settings: dict[str, Any]) -> None:
    """Continue what is in `output` as scripts do, and die when a `_save` for the step `kill_at` has written."""

    class Mine(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            if os.path.basename(str(output_dir)) == f"checkpoint-{settings['kill_at']}":
                os.kill(os.getpid(), signal.SIGKILL)

    options = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "logging_steps": 1}
    args = arguments(Path(settings["output"]), **options)
    trainer = Mine(Regression(), args, train_dataset=regression_rows(8), default_callbacks=False)
    directory = args.output_dir
    trainer.train(resume_from_checkpoint=get_last_checkpoint(directory) if os.path.isdir(directory) else None)
