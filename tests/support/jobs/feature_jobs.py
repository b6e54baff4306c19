"""What the ranks of the tests of features run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.config import DistributedInitConfig
from onstep.distributed import open_world
from onstep.errors import CollectiveAfterErrorError, ConfigError
from onstep.training import GlobalState, run_job
from onstep.training.compute.step import Step
from onstep.training.feature import Feature
from onstep.training.features import TRAINING
from onstep.training.run import Run
from onstep.training.stages.job import Job
from tests.support.small_runs import loader, run, small_state, sum_step

RANK = int(os.environ["RANK"])


def write(result: Any) -> None:
    Path(f"result-{RANK}.json").write_text(json.dumps(result))


def state_of_ranks() -> GlobalState:
    state = small_state(train_iters=3)
    state.world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
    state.cfg.ft.watchdog_seconds = None
    return state


class Summed(Feature[Run]):
    """Wanted on rank 1 alone; after each step all ranks add up their numbers."""

    name, collective = "summed", True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return host.world.rank == 1

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self.agreed: list[list[int]] = []

    def after_count(self, step: Step) -> None:
        self.agreed.append(self.host.world.agree([RANK, step.number > 1]))


class Alone(Feature[Run]):
    """Wanted on rank 1 alone, and talks to nobody."""

    name = "alone"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return host.world.rank == 1


def job_wishes(settings: dict[str, Any]) -> None:
    """Train with two features that rank 1 alone wants."""
    state = state_of_ranks()
    with state.features.open((Summed, Alone), state, state.world):
        run(state, data=loader(rank=RANK, world_size=2))
        summed = state.features.find(Summed)
        has_alone = state.features.find(Alone) is not None
    write({"agreed": None if summed is None else summed.agreed, "has_alone": has_alone})
    state.world.close()


REFUSED: list[str] = []


class Asks(Feature[Job]):
    """Asks the other ranks although the training has failed."""

    name = "asks"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return True

    @contextmanager
    def session(self) -> Iterator[None]:
        try:
            yield
        except ValueError:
            try:
                self.host.run.world.agree([1])
            except CollectiveAfterErrorError as error:
                REFUSED.append(str(error))
            raise


def job_error(settings: dict[str, Any]) -> None:
    """At step 2 both ranks, or rank 1 alone, meet an error."""
    run_job.TRAINING = (*TRAINING, Asks)
    state, notified = state_of_ranks(), ""

    def failing(data_iterator: Any, model: Any) -> Any:
        if state.train_state.step == 1 and RANK in settings["failing"]:
            raise ValueError("rank met an error")
        return sum_step(data_iterator, model)

    try:
        run(state, step=failing, data=loader(rank=RANK, world_size=2))
    except (ValueError, RuntimeError) as error:
        notified = type(error).__name__
    write({"refused": REFUSED, "told": notified, "step": state.train_state.step})
    state.world.close()


class Fragile(Alone):
    """Cannot be built on rank 1."""

    name = "fragile"

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        raise OSError("no such device")


class Closed(Alone):
    """Does not open on rank 1."""

    name = "closed"

    @contextmanager
    def session(self) -> Iterator[None]:
        raise OSError("no such device")
        yield


def job_fragile(settings: dict[str, Any]) -> None:
    """Train with a feature that rank 1 alone wants, and that cannot be built, or opened."""
    state, notified = state_of_ranks(), ""
    kind = {"fragile": Fragile, "closed": Closed}[settings["kind"]]
    try:
        with state.features.open((kind,), state, state.world):
            run(state, data=loader(rank=RANK, world_size=2))
    except (OSError, ConfigError) as error:
        notified = str(error)
    write({"told": notified, "step": state.train_state.step})
    state.world.close()
