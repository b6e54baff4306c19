"""Sets the arguments that a trial names, and defines the spaces that are searched by default."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from onstep.config import TrainingArguments
from onstep.errors import ConfigError

_BATCH_SIZE = "per_device_train_batch_size"
_EPOCHS = (1, 5)
_SEEDS = (1, 40)
_RATES = (1e-6, 1e-4)
_BATCH_SIZES = [4, 8, 16, 32, 64]


def default_space_optuna(trial: Any) -> dict[str, object]:
    """Learning rate, epochs, seed and batch size, as transformers searches them."""
    return {
        "learning_rate": trial.suggest_float("learning_rate", *_RATES, log=True),
        "num_train_epochs": trial.suggest_int("num_train_epochs", *_EPOCHS),
        "seed": trial.suggest_int("seed", *_SEEDS),
        _BATCH_SIZE: trial.suggest_categorical(_BATCH_SIZE, _BATCH_SIZES),
    }


def default_space_ray(trial: object) -> dict[str, object]:
    """The same, as transformers searches them with Ray Tune."""
    from ray import tune

    return {
        "learning_rate": tune.loguniform(*_RATES),
        "num_train_epochs": tune.choice(list(range(_EPOCHS[0], _EPOCHS[1] + 1))),
        "seed": tune.uniform(*_SEEDS),
        _BATCH_SIZE: tune.choice(_BATCH_SIZES),
    }


def args_of_trial(given: TrainingArguments, name: str) -> TrainingArguments:
    """A copy of the arguments, for a run named `name` in a directory of its own under `output_dir`."""
    args = copy.copy(given)
    args.output_dir = os.path.join(str(given.output_dir), name)
    if given.logging_dir is not None:
        args.logging_dir = os.path.join(given.logging_dir, name)
    if given.run_name is not None:
        args.run_name = f"{given.run_name}-{name}"
    return args


def set_parameters(args: TrainingArguments, parameters: object, *, others: bool) -> None:
    """Set the arguments that a trial names; values become those of the type that the argument has, as in transformers.

    Args:
        parameters: what the user's `hp_space` gave.
        others: whether names that are not arguments may be among them: for a `model_init` that receives the trial.

    Raises:
        ConfigError: for a name that is not an argument, and for a value that it cannot have.
    """
    if not isinstance(parameters, Mapping):
        raise ConfigError(f"hp_space must return a dict of arguments by name, got {parameters!r}")
    for name, value in parameters.items():
        if name not in vars(args):
            if others:
                continue
            raise ConfigError(
                f"hp_space names {name!r}, which is not an argument of {type(args).__name__}; name one of its "
                f"arguments, or let model_init accept the trial if the model is made from it."
            )
        if name == _BATCH_SIZE and args.auto_find_batch_size:
            raise ConfigError(
                f"hp_space names {name}, which auto_find_batch_size=True chooses; drop one of the two from the search."
            )
        setattr(args, name, _typed(name, value, getattr(args, name)))
    args.check()


def _typed(name: str, value: Any, before: object) -> Any:
    if before is None:
        return value
    kind: Any = type(before)
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ConfigError(f"hp_space gives {name}={value!r}, which cannot be made {kind.__name__}.") from None
