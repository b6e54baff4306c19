"""Checks what a search is asked for, and runs it with its backend."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from onstep.errors import ConfigError, extra
from onstep.record.kinds import Metrics
from onstep.stores.urls import is_url, without_secrets
from onstep.trainer.dataloaders import num_samples_of
from onstep.trainer.loaders.users_data import decides_data
from onstep.trainer.methods import TrainerMethods
from onstep.trainer.own_arguments import config_of
from onstep.trainer.training_checks import check_training
from onstep.trainer.trials.objective import default_compute_objective
from onstep.trainer.trials.parameters import default_space_optuna, default_space_ray, set_parameters
from onstep.trainer.trials.results import BestRun, HPSearchBackend, HPSpace, Wanted

_DIRECTIONS = ("minimize", "maximize")


def search(
    trainer: TrainerMethods,
    hp_space: HPSpace | None,
    compute_objective: Callable[[Metrics], Any] | None,
    n_trials: int,
    direction: str | Sequence[str],
    backend: str | None,
    hp_name: Callable[[Any], str] | None,
    options: dict[str, Any],
) -> BestRun | list[BestRun]:
    """The search of `Trainer.hyperparameter_search`. Collective."""
    if trainer.model_init is None:
        raise ConfigError(
            "hyperparameter_search requires model_init, which makes a new model for each trial; pass it to the Trainer "
            "in place of model."
        )
    if is_url(str(trainer.args.output_dir)):
        raise ConfigError(
            f"output_dir={without_secrets(str(trainer.args.output_dir))} must be a directory for a search, whose "
            f"trials and study are in it; name one on a disk that outlasts the machine."
        )
    wanted = Wanted(_checked_number(n_trials), _checked_directions(direction), options)
    chosen = _checked_backend(backend)
    check_training(trainer)
    before = trainer.hp_name, trainer.args
    trainer.hp_search_backend, trainer.hp_name = chosen, hp_name
    trainer.compute_objective = compute_objective or default_compute_objective
    trainer.idle_in_search = frozenset()
    try:
        if chosen is HPSearchBackend.RAY:
            return _search_with_ray(trainer, hp_space or default_space_ray, wanted)
        return _search_with_optuna(trainer, hp_space or default_space_optuna, wanted)
    finally:
        trainer.sweep = trainer.hp_search_backend = trainer._trial = None
        trainer.hp_name, trainer.args = before


def _search_with_optuna(trainer: TrainerMethods, space: HPSpace, wanted: Wanted) -> BestRun | list[BestRun]:
    with extra("optuna", "hyperparameter_search with backend='optuna' requires optuna"):
        from onstep.trainer.search.optuna_sweep import OptunaSweep, sample_of
    trainer.hp_space = space
    _check_sample(trainer, sample_of(space))
    trainer.sweep = sweep = OptunaSweep(trainer, wanted)
    return sweep.run()


def _search_with_ray(trainer: TrainerMethods, space: HPSpace, wanted: Wanted) -> BestRun:
    with extra("ray", "hyperparameter_search with backend='ray' requires Ray Tune"):
        from onstep.trainer.search.ray_sweep import RaySweep, sample_of
    trainer.hp_space = space
    sweep = RaySweep(trainer, wanted)
    _check_sample(trainer, sample_of(space))
    return sweep.run()


def _check_sample(trainer: TrainerMethods, parameters: object) -> None:
    """Reject (ConfigError) a space whose trial could not be trained with what it names, by one sample of it."""
    args = copy.copy(trainer.args)
    set_parameters(args, parameters, others=trainer._makes_model_from_trial())
    if not decides_data(trainer):
        config_of(
            args, num_samples=num_samples_of(trainer.train_dataset), world_size=args.world_size, for_training=True
        )


def _checked_backend(backend: str | None) -> HPSearchBackend:
    name = getattr(backend, "value", backend)  # of an enum of transformers
    if name is None:
        is_only_ray = find_spec("optuna") is None and find_spec("ray") is not None
        return HPSearchBackend.RAY if is_only_ray else HPSearchBackend.OPTUNA
    if name not in tuple(HPSearchBackend):
        raise ConfigError(f"backend must be 'optuna' or 'ray', got {name!r}")
    return HPSearchBackend(name)


def _checked_number(n_trials: object) -> int:
    if not isinstance(n_trials, int) or isinstance(n_trials, bool) or n_trials < 1:
        raise ConfigError(f"n_trials must be an integer >= 1, got {n_trials!r}")
    return n_trials


def _checked_directions(direction: object) -> tuple[str, ...]:
    named = [direction] if isinstance(direction, str) else direction
    if not isinstance(named, Sequence) or not named or not all(one in _DIRECTIONS for one in named):
        raise ConfigError(f"direction must be 'minimize' or 'maximize', or a list of them, got {direction!r}")
    return tuple(named)
