"""What each rank of sites without a server runs: `job_*(settings)`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onstep import Trainer, TrainerCallback
from onstep.callbacks import DiLoCoCallback
from onstep.diloco import DiLoCoWorker, Sites, divide_into_sites
from onstep.distributed.shards import whole
from onstep.errors import ConfigError
from tests.diloco.worker.crew import batches, small_model, train, values
from tests.support.jobs.site_jobs import BATCH, LAYOUTS, rows
from tests.support.small_models import TokenModel, arguments

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def plain(parameters: dict[str, Tensor]) -> dict[str, Any]:
    return {name: one.tolist() for name, one in parameters.items()}


def job_own_loop(settings: dict[str, Any]) -> list[Any]:
    """Each rank is a site, around a loop of its own; returns the parameters after each round."""
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    group: Any = f"tcp://{address}?rank={RANK}&world_size={SIZE}"
    if settings["is_default_group"]:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    model = small_model(seed=RANK, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    every, found = settings["every"], []
    options = {"sync_every": every, "codec": settings["codec"], "timeout": 60}
    with DiLoCoWorker(model, optimizer, group=group, **options) as worker:
        data = batches(RANK, settings["steps"], torch.float32)
        for start in range(0, len(data), every):
            train(model, optimizer, data[start : start + every])
            found.append(plain(values(model)))
        assert worker.registered.slot == RANK
        assert worker.sync_metrics["diloco/contributors"] == SIZE
    if settings["is_default_group"]:
        dist.destroy_process_group()
    return found


def job_twice(settings: dict[str, Any]) -> list[Any]:
    """Runs at one address, one after the other; returns the parameters, and why the last cannot resume at site 1."""
    url = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}?rank={RANK}&world_size={SIZE}"
    workers: list[DiLoCoWorker] = []
    found: list[Any] = []
    for run in range(2):
        time.sleep(0.3 * (run != RANK))  # each site is once ahead of the other
        model = small_model(seed=RANK, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCoWorker(model, optimizer, group=url, sync_every=2, timeout=20) as worker:
            workers.append(worker)
            train(model, optimizer, batches(RANK, 4, torch.float32))
            state = worker.state_dict()
        found.append(plain(values(model)))
    worker = DiLoCoWorker(model, None, group=url, sync_every=2, num_fragments=1 + RANK, timeout=20)
    worker.load_state_dict(state)
    try:
        worker.start()
    except ConfigError as error:
        found.append(str(error))
    return found


class Death(TrainerCallback):
    """Kills this process at the beginning of a step, once its checkpoint is written."""

    def __init__(self, step: int | None, directory: Path) -> None:
        self._step, self._directory = step, directory

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            while not list(self._directory.glob("**/checkpoint-3")):
                time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)


def job_trainer(settings: dict[str, Any]) -> dict[str, Any]:
    """A Trainer at each of two sites; returns the parameters at the end."""
    group = divide_into_sites(2, timeout=60)
    site, ranks = group.rank(), SIZE // 2
    directory = Path(settings["directory"]) / f"site-{site}"
    args = arguments(
        directory,
        max_steps=settings["steps"],
        learning_rate=0.05,
        per_device_train_batch_size=BATCH // ranks,
        save_steps=3,
        config_overrides={"run.save_weights": False, **LAYOUTS[settings["layout"]]},
    )
    sites = Sites(group, overlap_steps=settings.get("overlap"))
    callback = DiLoCoCallback(
        group=sites, sync_every=2, codec="int8", num_fragments=settings.get("fragments", 1), timeout=60
    )
    dies_at = settings.get("dies_at") if site == 1 else None
    trainer = Trainer(
        TokenModel(seed=site, dtype=torch.float64),
        args,
        train_dataset=rows(2 * BATCH * settings["steps"]),
        callbacks=[callback, Death(dies_at, directory)],
        default_callbacks=False,
    )
    trainer.train(resume_from_checkpoint=settings.get("resume", False))
    assert trainer.model is not None
    return plain({name: whole(one.detach()) for name, one in trainer.model.named_parameters()})
