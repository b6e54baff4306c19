"""Converts and checks the arguments that a user passes to the Trainer."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from onstep.config import (
    AnomalyConfig,
    CheckpointConfig,
    ConfigContainer,
    TrainingArguments,
    TrainingConfig,
    args_to_config,
    resolve,
)
from onstep.config.hf.checks import check_best_model, check_schedule_metric
from onstep.config.hf.optimizers import check_options
from onstep.config.hf.unparsed import UNPARSED
from onstep.errors import ConfigError
from onstep.stores.urls import is_url


def own_arguments(args: TrainingArguments | Mapping[str, Any] | None) -> TrainingArguments:
    """`args` as Onstep's `TrainingArguments`; None means the defaults.

    A mapping has them by name. An instance of Hugging Face's class is converted field by field. Fields added by a
    user's subclass of it are kept as attributes, for callbacks that read them.

    Raises:
        ConfigError: for any other type, and for an unsupported value.
    """
    # recognized without importing transformers; a user's class may derive from theirs
    bases = [base for base in type(args).__mro__ if base.__module__.split(".")[0] == "transformers"]
    theirs = next((base for base in bases if base.__name__ == "TrainingArguments"), None)
    if args is None:
        own = TrainingArguments()
    elif isinstance(args, TrainingArguments):
        own = args
    elif isinstance(args, Mapping):
        own = TrainingArguments(**args)
    elif theirs is not None and is_dataclass(args):
        own = _converted(args, theirs)
    else:
        raise ConfigError(
            f"args must be onstep.TrainingArguments, a dict of them, or transformers.TrainingArguments, got "
            f"{type(args).__name__}."
        )
    check_best_model(own)
    check_schedule_metric(own)
    check_options(own)
    return own


def config_of(
    args: TrainingArguments, *, num_samples: int | None, world_size: int, for_training: bool
) -> ConfigContainer:
    """The validated configuration of one call of the Trainer.

    A standalone evaluation has no length, so intervals given as a share of the run do not apply. It saves nothing and
    never rolls back, so the training's settings for checkpoints and anomalies are dropped.
    """
    if for_training:
        config = args_to_config(args, num_samples_per_epoch=num_samples, world_size=world_size)
        return _only_trained(resolve(config, args.parallel_sizes.ranks))
    args = copy.copy(args)
    args.logging_strategy = args.eval_strategy = args.save_strategy = "no"
    config = args_to_config(args, num_samples_per_epoch=num_samples, world_size=world_size)
    config.checkpoint, config.anomaly = CheckpointConfig(), AnomalyConfig()
    config.train.on_nonfinite, config.validation.eval_on_save = TrainingConfig().on_nonfinite, False
    return resolve(config, args.parallel_sizes.ranks)


def _only_trained(config: ConfigContainer) -> ConfigContainer:
    """Reject options that change the model before training, which the user passes, and training without steps."""
    if config.validation.skip_train:
        raise ConfigError("validation.skip_train=True is only for onstep.pretrain; call Trainer.evaluate() instead.")
    asked = {
        "checkpoint.pretrained_checkpoint": config.checkpoint.pretrained_checkpoint,
        "checkpoint.finetune": config.checkpoint.finetune or None,
        "peft.peft_scheme": config.peft.peft_scheme,
    }
    for key, value in asked.items():
        if value is not None:
            raise ConfigError(
                f"{key}={value} is only for onstep.finetune; a Trainer trains the model that it is given: load the "
                f"weights and apply peft before passing it."
            )
    return config


def local_output_dir(args: TrainingArguments) -> str:
    """The directory `output_dir` on this machine; for a URL, that which is mirrored in the object store."""
    if not is_url(str(args.output_dir)):
        return str(args.output_dir)
    run = config_of(args, num_samples=None, world_size=args.world_size, for_training=False).run
    return str(run.local_output_dir / str(run.name))


def shown_arguments(args: TrainingArguments, directory: str | None) -> TrainingArguments:
    """The arguments as callbacks see them: with the directory that the run actually has, which also holds the
    metrics logs.
    """
    shown = copy.copy(args)
    shown.output_dir = local_output_dir(args) if directory is None else directory
    shown.logging_dir = os.path.abspath(shown.logging_dir or str(shown.output_dir))
    return shown


def _converted(args: TrainingArguments, theirs: type) -> TrainingArguments:
    known = {field.name for field in fields(TrainingArguments) if field.init}
    of_hugging_face = {field.name: field for field in fields(theirs)}
    values = args.to_dict()
    for name in values.keys() - known:
        if name in of_hugging_face and values[name] != _default(of_hugging_face[name]):
            raise ConfigError(f"TrainingArguments.{name}={values[name]!r} is not supported; leave it at its default.")
    values["hub_token"] = getattr(args, "hub_token", None)  # which `to_dict` hides
    own = TrainingArguments(**{name: value for name, value in values.items() if name in known})
    for name in values.keys() - known - of_hugging_face.keys() - {*UNPARSED}:
        setattr(own, name, getattr(args, name))
    return own


def _default(field: Field[object]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()
