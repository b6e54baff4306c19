"""Rejects a training that cannot start, before anything is built."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from types import NoneType

from torch.utils.data import DataLoader

from onstep.config import TrainingArguments
from onstep.errors import ConfigError, DataError
from onstep.trainer.computing.model_options import check_options
from onstep.trainer.dataloaders import check_eval_data, check_samples, num_samples_of
from onstep.trainer.loaders.users_data import decides_data
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.optimizer_checks import check_optimizers
from onstep.trainer.optimizers import withdraw_optimizers
from onstep.trainer.overrides import overrides
from onstep.training.protocols import Checkpoints


def check_training(trainer: TrainerMethods, resume_from_checkpoint: object = None) -> None:
    """Reject (ConfigError, DataError) a `train()` that lacks something; the message names it."""
    args, dataset = trainer.args, trainer.train_dataset
    if trainer.session is not None:
        raise ConfigError("This Trainer is already training or evaluating; a callback may evaluate, but not train.")
    is_read_by_user = overrides(trainer, "get_train_dataloader")  # which may join several datasets
    if dataset is None and not is_read_by_user:
        raise ConfigError("Trainer.train requires a train_dataset; pass one to the constructor.")
    is_mapping = isinstance(dataset, Mapping) and 0 not in dataset
    if isinstance(dataset, (str, bytes)) or (is_mapping and not is_read_by_user):
        raise DataError(
            f"train_dataset must be a dataset of samples, got a {type(dataset).__name__}; pass an object whose "
            f"__getitem__(index) returns a sample, such as one split of datasets.load_dataset(...)."
        )
    if isinstance(dataset, type) or inspect.isgeneratorfunction(dataset):
        name = dataset.__name__
        raise DataError(f"train_dataset must be a dataset, got the class or function {name}; pass {name}(...)")
    if not isinstance(resume_from_checkpoint, (bool, str, os.PathLike, NoneType)):
        raise ConfigError(
            f"resume_from_checkpoint={resume_from_checkpoint!r} must be the path of a checkpoint, True or None (the "
            f"run's newest, if any), or False (do not continue)."
        )
    if not decides_data(trainer):
        check_length(num_samples_of(dataset), args)
    if isinstance(dataset, DataLoader) and dataset.batch_size not in (None, args.per_device_train_batch_size):
        raise ConfigError(
            f"The train_dataset is a DataLoader with batch_size={dataset.batch_size}, and per_device_train_batch_size="
            f"{args.per_device_train_batch_size} gives the run its length and schedule; make them the same."
        )
    check_samples("train_dataset", dataset, "join them with torch.utils.data.ConcatDataset")
    asked = {"eval_on_start=True": args.eval_on_start, "eval_on_save=True": args.eval_on_save}
    asked = {f"eval_strategy={args.eval_strategy!r}": args.eval_strategy != "no", **asked}
    if any(asked.values()) and not overrides(trainer, "get_eval_dataloader"):
        if trainer.eval_dataset is None:
            name = next(name for name, value in asked.items() if value)
            raise ConfigError(f"{name} requires an eval_dataset; pass one to the constructor.")
        check_eval_data(trainer.eval_dataset)
    check_options(args)
    withdraw_optimizers(trainer)
    check_optimizers(trainer)


def check_output_dir(trainer: TrainerMethods, checkpoints: Checkpoints | None, trial: object) -> None:
    """Reject (ConfigError) an overridden `_get_output_dir` that names another directory than that of the run."""
    if checkpoints is None or not overrides(trainer, "_get_output_dir"):
        return
    named, root = trainer._get_output_dir(trial), checkpoints.root
    if Path(named).resolve() != root.resolve():
        raise ConfigError(
            f"{type(trainer).__name__}._get_output_dir returned {named!r}, but the checkpoints of a run are in its "
            f"output_dir, {str(root)!r}; set output_dir={named!r}."
        )


def check_length(num_samples: int | None, args: TrainingArguments) -> None:
    """Reject (ConfigError, DataError) training data without a length in a run by epochs, and empty data."""
    if num_samples is None and args.max_steps <= 0:
        raise ConfigError("The train_dataset has no length, so num_train_epochs cannot end the run; set max_steps.")
    if num_samples == 0:
        raise DataError("The train_dataset is empty: it has 0 samples.")
