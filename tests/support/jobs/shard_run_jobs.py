"""What the ranks of the tests of runs with checkpoints in shards run: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onstep import CallbackManager
from onstep.callbacks import EMA
from onstep.checkpoint import FileStore, Operation, checkpoint_manager
from onstep.checkpoint.format import tensor_parts
from onstep.data import TrainLoader
from onstep.training import GlobalState, train
from tests.support.jobs.shard_jobs import digests_of
from tests.support.jobs.sharding_jobs import BATCH, MICRO, Watch, given_config, wrapped
from tests.support.small_runs import RaggedRows, TinyModel, sum_step


class Killing:
    """Kills this rank at one of its file operations.

    Args:
        kind: the operation; `load` for the reading of a tensor.
        name: what the name of its file begins with.
        number: how many such operations are carried out before.
    """

    def __init__(self, kind: str, name: str, number: int) -> None:
        self._kind, self._name, self._left = kind, name, number

    def __call__(self, operation: Operation) -> None:
        self.count(operation.kind, operation.path.name)

    def count(self, kind: str, name: str) -> None:
        if kind == self._kind and name.startswith(self._name):
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        """Kill this rank in whatever it saves or loads from now on."""
        fill = tensor_parts.fill

        def counted(file: Any, path: Path, name: str, tensor: Tensor) -> None:
            self.count("load", path.name)
            fill(file, path, name, tensor)

        tensor_parts.fill = counted
        checkpoint_manager.FileStore = lambda: FileStore(self)  # type: ignore[misc,assignment]


def job_run(settings: dict[str, Any]) -> dict[str, Any]:
    """`train()` of a model that the user has wrapped, from the newest checkpoint if there is one."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        dist.init_process_group("gloo")
    config = given_config()
    config.train.train_iters = settings["steps"]
    config.checkpoint.save, config.checkpoint.save_interval = "checkpoints", settings.get("save_interval", 2)
    config.checkpoint.async_save = settings.get("async", False)
    config.checkpoint.validate_replication = settings.get("validates", False)
    if rank == settings.get("killed"):
        Killing(*settings["at"]).install()
    model = TinyModel(seed=settings.get("seed", 0))
    if ranks > 1:
        model = wrapped(settings["how"], model)
    state = GlobalState(cfg=config, num_microbatches=BATCH // (MICRO * ranks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch, manager, average = Watch(), CallbackManager(), EMA(0.9)
    manager.add(watch)
    if settings.get("averages"):
        manager.add(average)
    loader = TrainLoader(
        RaggedRows(144), seed=1, micro_batch_size=MICRO, global_batch_size=BATCH, rank=rank, world_size=ranks
    )
    train(sum_step, [model], optimizer, None, loader, None, state, callback_manager=manager)
    averages = {name.removeprefix("module."): value for name, value in average.averages.items()}
    return {
        "averages": digests_of(averages, "average"),
        "losses": watch.losses,
        "norms": watch.norms,
        "digests": digests_of(
            {key.removeprefix("module."): value for key, value in model.state_dict().items()}, "model"
        ),
    }
