"""Trains one trial as a run of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onstep.distributed import World
from onstep.errors import PREEMPTED
from onstep.trainer.own_arguments import config_of
from onstep.trainer.session import ranks_of
from onstep.trainer.trials.objective import Objective, objective_of
from onstep.trainer.trials.parameters import args_of_trial


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
