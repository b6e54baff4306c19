"""Ranks of which one fails while destroying the process group would wait for the others, as NCCL's does."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from onstep import Callback, Trainer, TrainerCallback, pretrain
from onstep.config import DistributedDataParallelConfig, DistributedInitConfig
from onstep.distributed import data_parallel, open_world, opening, process_group
from tests.support.jobs.rank_jobs import RANK, config
from tests.support.small_models import Regression, arguments, regression_rows
from tests.support.waiting import until


class FailsOnRankOne(TrainerCallback):
    """Raises on rank 1, which the others do not learn."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2 and int(os.environ["RANK"]) == 1:
            raise ValueError("of the test")


def wait_for_the_others(*args: object) -> None:
    """What destroying NCCL's communicators does while other ranks do not."""
    print("destroying the group", flush=True)
    threading.Event().wait()


def job_fails(settings: dict[str, Any]) -> None:
    """A run whose rank 1 raises in its second step, without a watchdog."""
    dist.destroy_process_group, device = wait_for_the_others, settings.get("device", "cpu")
    if settings["door"] == "trainer":
        options = {"use_cpu": device == "cpu", "config_overrides": {"ft.watchdog_seconds": None}}
        args = arguments(Path(), max_steps=6, **options)
        Trainer(Regression(), args, train_dataset=regression_rows(48), callbacks=[FailsOnRankOne()]).train()
    else:
        chosen = config(settings)
        chosen.ft.watchdog_seconds, chosen.dist.device = None, device
        pretrain(chosen, callbacks=[FailsOnRankOne()])


@contextmanager
def two_backends() -> Iterator[None]:
    """A group with a backend for each kind of device, as with NCCL."""
    mixed = {"backend": "cuda:gloo,cpu:gloo"}
    with mock.patch.object(process_group, "group_options", return_value=mixed):
        yield


def job_reduces(settings: dict[str, Any]) -> dict[str, Any]:
    """What a callback reduces, and what ranks agree on, in a group of two backends."""
    with two_backends():
        world = open_world(DistributedInitConfig(device="cpu"))
    try:
        tensor = torch.tensor([world.rank + 1.0])
        dist.all_reduce(tensor)
        dist.barrier()
        has_own_group = world.control_group is not None
        return {"sum": tensor.item(), "agreed": world.agree([world.rank]), "has_own_group": has_own_group}
    finally:
        world.close()


def job_waits(settings: dict[str, Any]) -> str:
    """The notes of the error of a rank whose peer does not come."""
    world, ended = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.05)), Path("ended")
    try:
        while world.is_main and not ended.exists():
            time.sleep(0.01)
        if not world.is_main:
            world.barrier()
    except RuntimeError as error:
        return " ".join(error.__notes__)
    finally:
        ended.touch()
        world.abandon()
    return ""


def limits() -> list[float]:
    """The time limits of all groups, in seconds."""
    groups: Any = dist.distributed_c10d._world.pg_map
    return [one._get_backend(torch.device("cpu")).options._timeout.total_seconds() for one in groups]


def job_limits_for_a_while(settings: dict[str, Any]) -> list[list[float]]:
    """The limits before, within and after those of a training, twice in one world."""
    with closing(open_world(DistributedInitConfig(device="cpu"))) as world:
        world.group("dp_replicate")
        found = [limits()]
        for seconds in (45.0, 30.0):
            world.limit(2 * seconds)
            world.limit(seconds)
            found.append(limits())
            world.unlimit()
            found.append(limits())
        return found


class ComesLate(Callback):
    """On rank 1: late for the first step, and not at all after the second, as long as the other rank waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.limits = seconds, list[list[float]]()

    def on_train_start(self, context: Any) -> None:
        context.state.world.group("dp_replicate")
        context.state.world.mesh.get_group("tp")

    def on_step_begin(self, context: Any) -> None:
        self.limits.append(limits())
        if RANK == 1 and len(self.limits) == 1:
            time.sleep(self.seconds)

    def on_step_end(self, context: Any) -> None:
        while RANK == 1 and len(self.limits) == 2 and not Path("ended").exists():
            time.sleep(0.01)


def job_comes_late(settings: dict[str, Any]) -> dict[str, Any]:
    """The limits of all groups at the beginning of each step, and the notes of the error of the rank that waits."""
    chosen, late, notes = config(settings), ComesLate(2.5), ""
    chosen.ft.watchdog_seconds, chosen.dist.timeout_after_first_step = None, 2.0
    try:
        pretrain(chosen, callbacks=[late])
    except RuntimeError as error:
        notes = " ".join(getattr(error, "__notes__", ()))
    finally:
        Path("ended").touch()
    return {"limits": late.limits, "notes": notes}


def threads() -> int:
    """How many threads this process has, also those of gloo."""
    return len(list(Path("/proc/self/task").iterdir()))


def held(num_threads: int | None = None) -> list[int]:
    """How many groups torch knows, by each of its tables, and the threads, of which `num_threads` may be left.

    The system counts a thread for a moment after it was joined.
    """
    gc.collect()
    torchs: Any = dist.distributed_c10d._world
    tables = torchs.pg_map, torchs.pg_names, torchs.pg_group_ranks
    if num_threads is not None:
        until(lambda: threads() <= num_threads, lambda: f"{threads()} threads are left, not {num_threads}", seconds=30)
    return [*map(len, tables), threads()]


def use_a_group(fails: bool = False) -> None:
    """Train a model in DDP for a step, with all groups of a mesh."""
    with closing(open_world(DistributedInitConfig(device="cpu"))) as world:
        assert world.mesh["dp_replicate"].size() == world.expert_mesh["expt_dp"].size() == 2
        world.group("pp", "tp")
        [model] = data_parallel([torch.nn.Linear(2, 1)], world, DistributedDataParallelConfig())
        model(torch.ones(1, 2)).sum().backward()
        if fails:
            raise ValueError("of the test")


def job_opens_again(settings: dict[str, Any]) -> list[list[int]]:
    """What is held after each of several runs of one process, of which some fail, also as they begin."""
    use_a_group()
    found = [held()]
    most = found[0][-1]
    use_a_group()
    found.append(held(most))
    with suppress(ValueError):
        use_a_group(fails=True)
    found.append(held(most))
    with suppress(ValueError), mock.patch.object(opening, "control_group", side_effect=ValueError):
        open_world(DistributedInitConfig(device="cpu"))
    found.append(held(most))
    use_a_group()
    return [*found, held(most)]
