"""What the ranks of the tests of timers and stragglers run: `job_*(settings)`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config import ConfigContainer
from onstep.data import TrainLoader
from onstep.distributed import data_parallel, open_world
from onstep.optim import TrainingOptimizer
from onstep.training import GlobalState, Timers, train
from onstep.training.reporting.timers import Clock
from tests.support.small_runs import LENGTH, RaggedRows, TinyModel, sum_step

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def write(result: Any) -> None:
    Path(f"result-{RANK}.json").write_text(json.dumps(result))


def job_timers(settings: dict[str, Any]) -> None:
    """Each rank's clock runs at its own speed: 1 s a tick on rank 0, 2 s on rank 1."""
    ticks = iter(range(1000))
    world = open_world(ConfigContainer().dist)
    timers = Timers(2, world=world, clock=lambda: (RANK + 1.0) * next(ticks))
    with timers("optimizer").measure(barrier=True):
        pass
    gathered = timers.gather(["optimizer"], reset=False)
    timers.log(["optimizer"])
    write({"gathered": gathered, "maxima": timers.maxima(["optimizer"])})
    world.close()


class Spent:
    """Tells the seconds that a rank has spent as its settings say, whatever the machine does meanwhile."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1e-6
        return self.seconds


class SlowRows(RaggedRows):
    """Rows that take their time on a clock."""

    def __init__(self, count: int, spent: Spent, seconds: float) -> None:
        super().__init__(count)
        self._spent, self._seconds = spent, seconds

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self._spent.seconds += self._seconds
        return super().__getitem__(index)


def job_straggler(settings: dict[str, Any]) -> None:
    """Train; rank 1 is slow in its dataset or forward pass, as `data` and `compute` (seconds a micro-batch) say."""
    spent = Spent()
    config = ConfigContainer()
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = 2, 2 * SIZE, 6
    config.model.seq_length, config.dist.device = LENGTH, "cpu"
    config.logger.log_interval, config.validation.eval_iters = 2, None
    for name, value in settings.get("straggler", {}).items():
        setattr(config.straggler, name, value)
    world = open_world(config.dist)
    state = GlobalState(config, world)
    state.clock = Clock(elapsed=spent)
    state.control.rank, state.cfg.logger.console = RANK, "bridge"
    rows = SlowRows(24, spent, settings.get("data", 0.0) / 2 if RANK == 1 else 0.0)

    def step(data_iterator: Any, model: nn.Module) -> Any:
        spent.seconds += settings.get("base", 0.02) + (settings.get("compute", 0.0) if RANK == 1 else 0.0)
        return sum_step(data_iterator, model)

    torch.set_num_threads(1)
    model = data_parallel([TinyModel()], world, config.ddp)
    optimizer = TrainingOptimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
    data = TrainLoader(rows, micro_batch_size=2, global_batch_size=2 * SIZE, rank=RANK, world_size=SIZE)
    train(step, model, optimizer, None, data, None, state)
    found = [[one.rank, one.cause] for one in getattr(state.straggler_timer, "stragglers", ())]
    write(
        {"step": state.train_state.step, "found": found, "decided": state.exits.decided, "why": state.exits.straggler}
    )
    world.close()
