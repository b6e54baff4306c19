"""What can be known to be wrong before anything is built."""

from __future__ import annotations

import os
from types import NoneType
from typing import Any

from torch.utils.data import DataLoader

from onstep.errors import ConfigError, DataError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.optimizers import check_optimizers, forget_made


def check_training(trainer: BaseTrainer, resume_from_checkpoint: Any = None) -> None:
    """Check that `train()` has what it needs.

    Raises:
        ConfigError: naming what is missing.
        DataError: for an empty training set.
    """
    args, dataset = trainer.args, trainer.train_dataset
    if trainer.session is not None:
        raise ConfigError("This Trainer is training or evaluating already; a callback may evaluate, but not train.")
    if dataset is None:
        raise ConfigError("Trainer.train needs a train_dataset; pass one to the constructor.")
    if not isinstance(resume_from_checkpoint, (bool, str, os.PathLike, NoneType)):
        raise ConfigError(
            f"resume_from_checkpoint={resume_from_checkpoint!r} must be the path of a checkpoint, True or None (the "
            f"run's newest, where there is one), or False (do not continue)."
        )
    num_samples = num_samples_of(dataset)
    if num_samples is None and args.max_steps <= 0:
        raise ConfigError("The train_dataset has no length, so num_train_epochs cannot end the run; set max_steps.")
    if num_samples == 0:
        raise DataError("The train_dataset is empty: it has 0 samples.")
    asked = {"eval_on_start=True": args.eval_on_start, "eval_on_save=True": args.eval_on_save}
    asked = {f"eval_strategy={args.eval_strategy!r}": args.eval_strategy != "no", **asked}
    if trainer.eval_dataset is None and any(asked.values()):
        name = next(name for name, value in asked.items() if value)
        raise ConfigError(f"{name} needs an eval_dataset; pass one to the constructor.")
    forget_made(trainer)
    check_optimizers(trainer)


def num_samples_of(dataset: Any) -> int | None:
    """Samples of a dataset; None where it has no length."""
    samples: Any = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    try:
        return len(samples)
    except (TypeError, NotImplementedError):
        return None
