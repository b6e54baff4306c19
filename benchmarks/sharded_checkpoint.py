"""What a checkpoint in shards costs: ours beside `torch.distributed.checkpoint`, on ranks of this machine, interleaved.

    python benchmarks/sharded_checkpoint.py --parameters 50_000_000 --repetitions 5

Beside it, what the newest state costs in the memory of one node or of two, where each rank counts as a node. A model of
feed-forward blocks, sharded by `fully_shard`, with its AdamW state: 600 MB for 50 million parameters. Each
repetition saves and loads it every way, in turn; before each the page cache is written out. Printed are medians of the
slowest rank without the first repetition, in which memory is allocated that later saves reuse; the bytes that each rank
writes; and the most resident memory of a rank over that before a call.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from checkpoint import stack_of_blocks
from local_ranks import start_ranks
from onstep.checkpoint import (
    CheckpointInfo,
    CheckpointManager,
    ModelState,
    SaveRequest,
    SharingPattern,
    StateComponent,
    resolve,
)
from onstep.checkpoint.memory_checkpoints import MemoryCheckpoints
from onstep.checkpoint.node_memory import open_node_memory
from onstep.config import DistributedInitConfig
from onstep.distributed import World, open_world
from onstep.training.checkpointing.optimizer_state import OptimizerState

MEMORY = "/dev/shm"
LIMITS = {"onstep, blocking": ("dcp.save", 1.1)}
"""How many times another row a row may take."""


class Case:
    """A sharded model and its optimizer, whose states are saved."""

    def __init__(self, parameters: int, world: World) -> None:
        torch.manual_seed(0)
        self.world = world
        self.model = stack_of_blocks(parameters)
        mesh = init_device_mesh("cpu", (world.size,), mesh_dim_names=("dp_shard",))
        for block in self.model.children():
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def components(self) -> list[StateComponent]:
        """What is saved."""
        optimizer = OptimizerState(self.optimizer, [self.model])
        pattern = SharingPattern.SHARDED
        return [
            StateComponent("model", ModelState([self.model]), pattern),
            StateComponent("optimizer", optimizer, pattern),
        ]

    def state(self) -> dict[str, Any]:
        """The same, for torch."""
        return {"model": self.model.state_dict(), "optimizer": get_optimizer_state_dict(self.model, self.optimizer)}


def resident(field: str) -> int:
    """A figure of this process's memory in bytes: VmRSS now, VmHWM the highest."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


class Clock:
    """Seconds and bytes of memory of each way, of the slowest rank."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.memory: dict[str, list[int]] = defaultdict(list)

    def measure(self, name: str, work: Callable[[], object]) -> None:
        """Do the work on all ranks. Collective."""
        os.sync()
        self._world.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before, start = resident("VmRSS"), time.perf_counter()
        work()
        taken = [time.perf_counter() - start, float(resident("VmHWM") - before)]
        rows = self._world.gather_numbers(taken)
        self.seconds[name].append(max(seconds for seconds, _ in rows))
        self.memory[name].append(int(max(size for _, size in rows)))


def states_in_memory(world: World, parent: Path) -> dict[str, MemoryCheckpoints]:
    """The newest state in memory, of this rank only and of two, each of which is a node."""
    os.environ["GROUP_RANK"] = str(world.rank)
    own = parent / str(world.rank)
    own.mkdir()
    memory = {name: open_node_memory(world, own, name) for name in ("one", "two", "async")}
    return {
        "in memory of one node": MemoryCheckpoints(memory["one"], world, copies=1),
        "in memory of two": MemoryCheckpoints(memory["two"], world, copies=2),
        "in memory of two, async": MemoryCheckpoints(memory["async"], world, copies=2, is_async=True),
    }


def measure(parameters: int, repetitions: int, parent: str, memory: str) -> None:
    """What each rank does."""
    world = open_world(DistributedInitConfig(device="cpu"))
    case, clock = Case(parameters, world), Clock(world)
    blocking, later = (CheckpointManager(Path(parent), world, async_save=is_async) for is_async in (False, True))
    in_memory = states_in_memory(world, Path(memory))
    sizes: dict[str, int] = {}
    for repetition in range(repetitions + 1):
        root = Path(parent) / f"{repetition}"
        blocking.root, later.root = root / "onstep", root / "onstep-async"
        clock.measure("onstep, blocking", lambda: blocking.save(SaveRequest(1, case.components(), {})))
        clock.measure("dcp.save", partial(save_by_torch, case, root / "dcp"))
        for name, states in in_memory.items():
            request = SaveRequest(repetition, case.components(), {})
            clock.measure(f"{name}: loop blocked", partial(states.save, request))
            clock.measure(f"{name}: the rest", states.finalize)
        clock.measure("onstep, async: loop blocked", lambda: later.save(SaveRequest(1, case.components(), {})))
        clock.measure("onstep, async: the rest", later.finalize)
        info = resolve(root / "onstep")
        clock.measure("onstep, load", partial(load_by_onstep, case, blocking, info))
        clock.measure("dcp.load", partial(load_by_torch, case, root / "dcp"))
        sizes = {name: digest.size for name, digest in info.manifest.files.items()}
        world.barrier()
        if world.is_main:
            shutil.rmtree(root)
    if world.is_main:
        report(clock, sizes, world.size)
    later.close()
    for states in in_memory.values():
        states.close()
        states.remove()
    world.close()


def save_by_torch(case: Case, path: Path) -> None:
    """As torch's documentation does it."""
    state_dict_saver.save(case.state(), checkpoint_id=path)


def load_by_onstep(case: Case, manager: CheckpointManager, info: CheckpointInfo) -> None:
    """Into the model and the optimizer that exist."""
    manager.load(info, case.components())


def load_by_torch(case: Case, path: Path) -> None:
    """As torch's documentation does it."""
    state = case.state()
    state_dict_loader.load(state, checkpoint_id=path)
    case.model.load_state_dict(state["model"])
    set_optimizer_state_dict(case.model, case.optimizer, state["optimizer"])


def report(clock: Clock, sizes: dict[str, int], ranks: int) -> None:
    """Print the figures."""
    of_ranks = [sum(size for name, size in sizes.items() if f"rank_{rank}." in name) for rank in range(ranks)]
    share = sum(of_ranks) / ranks
    parts = ", ".join(f"{size / 1e6:.1f} MB ({size / share - 1:+.2%} of its share)" for size in of_ranks)
    print(f"bytes by rank: {parts}")
    print(f"{'':32}{'seconds':>9}{'memory MB':>11}")
    medians = {name: statistics.median(seconds[1:]) for name, seconds in clock.seconds.items()}
    for name, seconds in medians.items():
        reference, limit = LIMITS.get(name, ("", None))
        beside = "" if limit is None else f"   {seconds / medians[reference]:.2f} of {reference} (limit {limit})"
        print(f"{name:32}{seconds:9.3f}{max(clock.memory[name]) / 1e6:11.1f}{beside}")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=5_000_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where to save; by default that of temporary files")
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")  # without it freed memory stays with the process
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as parent,
        tempfile.TemporaryDirectory(dir=MEMORY) as memory,
    ):
        start_ranks(measure, options.ranks, options.parameters, options.repetitions, parent, memory)


if __name__ == "__main__":
    main()
