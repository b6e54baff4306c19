"""What the processes of the signal tests run: `signal_script.py JOB FOLDER`. They talk by files in the folder."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from onstep.data import IterableLoader, TrainLoader
from onstep.training.lifecycle.data_timeout import DataTimeout, DataWait
from onstep.training.runs import signals
from onstep.training.runs.signals import DistributedSignalHandler, Preempted

FOLDER = Path(sys.argv[2])
EXIT_SIGNALS = ["SIGTERM", "SIGINT", "SIGUSR1"]


def wait_until(is_true: Any) -> None:
    while not is_true():
        time.sleep(0.01)


def tell(name: str, what: Any = None) -> None:
    partial = FOLDER / f".{name}"
    partial.write_text(json.dumps(what))
    partial.rename(FOLDER / name)


class Rows(torch.utils.data.Dataset[Any]):
    """Row `waits_at` comes when the file `go` is there; the worker that reads it tells its process id."""

    def __init__(self, waits_at: int) -> None:
        self.waits_at = waits_at

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.waits_at:
            tell("waiting", os.getpid())
            wait_until((FOLDER / "go").exists)
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


def job_twice() -> None:
    signals.REPEAT_WINDOW_SECONDS = 0.0
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        tell("ready")
        wait_until(lambda: handler.received)
        tell("first", handler.signal_name)
        while True:
            time.sleep(0.01)


def job_fork() -> None:
    """A forked process sets nothing, survives what a terminal sends, and ends by SIGTERM."""
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGUSR1)
            tell("child", handler.received)
            signal.raise_signal(signal.SIGTERM)
            os._exit(3)
        _, status = os.waitpid(child, 0)
        tell("result", {"child_ended_by": os.WTERMSIG(status), "received": handler.received})


def job_workers() -> None:
    """Reads with a worker until the data ends or is given up, as the loop would."""
    loader = loader_of(Rows(3), 2, sys.argv[4])
    timeout = float(sys.argv[3]) if sys.argv[3] != "None" else None
    seen: list[int] = []
    given_up = None
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        while given_up is None:
            position = loader.state_dict()
            try:
                step = DataWait(lambda: loader.read(1), handler, timeout)()
            except DataTimeout as error:
                given_up = str(error)
                assert loader.state_dict() == position
                break
            if step is None:
                break
            seen += [int(x) for x in step.micro_batches[0]["x"].flatten()]
            tell("seen", seen)
        result = {"seen": seen, "given_up": given_up, "received": handler.received, "position": loader.state_dict()}
    tell("result", result)
    loader.close()
    sys.stdout.flush()
    raise Preempted("done")


def job_step() -> None:
    """The signal comes between two reads, in the middle of a step, and ends the workers, or they are killed."""
    loader = loader_of(Rows(7), 1, sys.argv[3])
    with DistributedSignalHandler(EXIT_SIGNALS) as handler:
        loader.read(1)
        workers = multiprocessing.active_children()
        tell("ready", [worker.pid for worker in workers])
        wait_until(lambda: handler.received and not any(worker.is_alive() for worker in workers))
        tell("result", handler.lost_workers)
    loader.close()


def job_ranks() -> None:
    from onstep.config.parts import DistributedInitConfig
    from onstep.distributed import open_world

    world = open_world(DistributedInitConfig(device="cpu"))
    with DistributedSignalHandler(EXIT_SIGNALS, world=world) as handler, DistributedSignalHandler(EXIT_SIGNALS) as bare:
        before = handler.signals_received()
        if world.rank == 1:
            signal.raise_signal(signal.SIGUSR1)
        tell(f"rank-{world.rank}", [before, handler.signals_received(), bare.signals_received()])
    world.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[f"job_{sys.argv[1]}"]()
