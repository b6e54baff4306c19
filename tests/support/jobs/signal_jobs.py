"""What the processes of the signal tests run: `job_*(settings)`. They talk by files in their directory."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from onstep.data import IterableLoader, TrainLoader
from onstep.training.lifecycle.data_timeout import DataTimeout, DataWait
from onstep.training.runs import signals
from onstep.training.runs.signals import DistributedSignalHandler, Preempted

DIRECTORY = Path()
EXIT_SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1"]


def wait_until(is_true: Any) -> None:
    while not is_true():
        time.sleep(0.01)


def notify(name: str, what: Any = None) -> None:
    partial = DIRECTORY / f".{name}"
    partial.write_text(json.dumps(what))
    partial.rename(DIRECTORY / name)


class Rows(torch.utils.data.Dataset[Any]):
    """Row `waits_at` comes when the file `go` is there; the worker that reads it tells its process id."""

    def __init__(self, waits_at: int) -> None:
        self.waits_at = waits_at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.waits_at:
            notify("waiting", os.getpid())
            wait_until((DIRECTORY / "go").exists)
        return {"x": torch.tensor([index])}


def loader_of(rows: Rows, micro_batch_size: int, kind: str) -> TrainLoader | IterableLoader:
    """Two workers of our own, which outlive a SIGTERM to the group, or the one of a user's plain torch loader.

    One, so that no batch is on its way from another worker at the moment when that dies.
    """
    size = micro_batch_size
    if kind == "ours":
        return TrainLoader(rows, micro_batch_size=size, global_batch_size=size, shuffle=False, num_workers=2)
    plain = torch.utils.data.DataLoader(rows, batch_size=size, num_workers=1)
    return IterableLoader(plain, micro_batch_size=size, already_batched=True)


def job_twice(settings: dict[str, Any]) -> None:
    signals.REPEAT_WINDOW_SECONDS = 0.0
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        notify("ready")
        wait_until(lambda: handler.received)
        notify("first", handler.signal_name)
        while True:
            time.sleep(0.01)


def job_fork(settings: dict[str, Any]) -> None:
    """A forked process sets nothing, survives what a terminal sends, and ends by SIGTERM."""
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            notify("child", handler.received)
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        notify("result", {"child_ended_by": os.WTERMSIG(status), "received": handler.received})


def job_workers(settings: dict[str, Any]) -> None:
    """Reads with a worker until the data ends or is given up, as the loop would."""
    loader = loader_of(Rows(3), 2, settings["loader"])
    seen: list[int] = []
    given_up = None
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        while given_up is None:
            position = loader.state_dict()
            try:
                step = DataWait(lambda: loader.read(1), handler, settings["timeout"])()
            except DataTimeout as error:
                given_up = str(error)
                assert loader.state_dict() == position
                break
            if step is None:
                break
            seen += [int(x) for x in step.micro_batches[0]["x"].flatten()]
            notify("seen", seen)
        result = {"seen": seen, "given_up": given_up, "received": handler.received, "position": loader.state_dict()}
    notify("result", result)
    loader.close()
    raise Preempted("done")


def job_step(settings: dict[str, Any]) -> None:
    """The signal comes between two reads, in the middle of a step, and ends the workers, or they are killed."""
    loader = loader_of(Rows(7), 1, settings["loader"])
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        loader.read(1)
        workers = multiprocessing.active_children()
        notify("ready", [worker.pid for worker in workers])
        wait_until(lambda: handler.received and not any(worker.is_alive() for worker in workers))
        notify("result", handler.lost_workers)
    loader.close()


def job_ranks(settings: dict[str, Any]) -> None:
    from onstep.config import DistributedInitConfig
    from onstep.distributed import open_world

    world = open_world(DistributedInitConfig(device="cpu"))
    with DistributedSignalHandler(EXIT_SIGNALS, world=world) as handler, DistributedSignalHandler(EXIT_SIGNALS) as bare:
        before = handler.signals_received()
        if world.rank == 1:
            signal.raise_signal(signal.SIGUSR1)
        notify(f"rank-{world.rank}", [before, handler.signals_received(), bare.signals_received()])
    world.close()
