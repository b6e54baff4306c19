"""Trains one trial as a run of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.checkpoint import checkpoints
from onstep.distributed import World
from onstep.errors import PREEMPTED, ConfigError
from onstep.trainer.own_arguments import config_of
from onstep.trainer.session import ranks_of
from onstep.trainer.trials.objective import Objective, objective_of
from onstep.trainer.trials.parameters import args_of_trial
from onstep.training.runs.run_dir import FINISHED, RunDir


def check_options(options: Mapping[str, object], known: Collection[str], backend: str, what: str) -> None:
    """Reject (ConfigError) keywords that the backend does not have; `what` says which it has."""
    unknown = sorted(options.keys() - set(known))
    if unknown:
        raise ConfigError(
            f"hyperparameter_search has no keyword {', '.join(unknown)} with backend='{backend}'; it accepts {what}."
        )


def name_of_trial(trainer: Any, trial: Any, number: int, others: Mapping[object, int]) -> str:
    """The name of a new trial's directory: `run-<number>`, or what `hp_name` returns.

    Args:
        trainer: the Trainer of the search.
        trial: what `hp_name` receives.
        number: of the trial.
        others: the numbers of the other trials, by name.

    Raises:
        ConfigError: if it is not a new name of a directory.
    """
    name = f"run-{number}" if trainer.hp_name is None else trainer.hp_name(trial)
    if not isinstance(name, str) or Path(name).name != name or name in others:
        taken = f", which is that of trial {others[name]}" if name in others else ""
        raise ConfigError(
            f"hp_name must return a new directory name for each trial, got {name!r} for trial {number}{taken}; use "
            f"what differs between trials in it"
        )
    return name


def found_run(root: Path, name: str) -> tuple[bool, bool]:
    """Whether the run of a trial has ended, and whether it has a checkpoint to continue from."""
    run = RunDir(root / name)
    if not name or not run.run_json.is_file():
        return False, False
    return run.read().get("status") in FINISHED, bool(checkpoints(run.checkpoints))


@contextmanager
def ranks(trainer: Any) -> Iterator[World]:
    """The ranks of a search, between two trainings. Collective."""
    size = trainer.args.world_size
    if size == 1:
        yield World()
        return
    with ranks_of(config_of(trainer.args, num_samples=None, world_size=size, for_training=False)) as world:
        yield world


def objective_of_run(trainer: Any, trial: object, name: str, count: int, *, resumes: bool) -> Objective:
    """Train a trial in its directory, and return its objective: that of its last evaluation. Collective.

    Args:
        trainer: the Trainer of the search, whose arguments are as before afterwards.
        trial: the trial, as rank 0 or the others have it.
        name: the name of its directory.
        count: the number of directions.
        resumes: whether its run continues from its newest checkpoint, rather than starting.

    Raises:
        SystemExit: if the run has paused, so that calling the search again continues it.
    """
    given, trainer.objective = trainer.args, None
    trainer.args = args_of_trial(given, name)
    try:
        trainer.train(resume_from_checkpoint=resumes, trial=trial)
        if trainer.global_state.exits.decided is not None:
            raise SystemExit(PREEMPTED)
        with ranks(trainer) as world:
            objective: Objective | None = world.share(trainer.objective)
        if objective is None:  # no evaluation was due
            objective = objective_of(trainer.compute_objective, trainer.evaluate(), count)
        return objective
    finally:
        trainer.args, trainer.model = given, None
