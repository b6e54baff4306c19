"""What each rank of the tests of checkpoints in memory runs: `job_*(settings)`. Every rank is a node of its own."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from onstep.checkpoint import CheckpointManager, SaveRequest, StateComponent
from onstep.checkpoint.memory_checkpoints import MemoryCheckpoints
from onstep.checkpoint.node_memory import open_node_memory
from onstep.distributed import World
from tests.support.jobs.checkpoint_jobs import RANK, Box, component, outcome, ranks

ROWS = 12
"""What 1, 2, 3 and 4 ranks divide."""


class Nodes:
    """The memory of each rank, as a directory below one, and the states that are saved there.

    Args:
        world: the ranks.
        parent: of the directories.
        size: numbers in each row of the sharded tensor.
        options: of `MemoryCheckpoints`.
    """

    def __init__(self, world: World, parent: Path, *, size: int = 1, **options: Any) -> None:
        os.environ["GROUP_RANK"] = str(RANK)
        self.world, self.parent, self._size = world, parent, size
        self.own = parent / str(RANK)
        self.own.mkdir(parents=True, exist_ok=True)
        self.memory = open_node_memory(world, self.own, "test")
        self.kept: list[int] = []
        self.checkpoints = MemoryCheckpoints(
            self.memory, world, run_id="run", on_kept=lambda request: self.kept.append(request.step), **options
        )
        self.mesh = init_device_mesh("cpu", (world.size,))

    def parts(self, step: int) -> list[StateComponent]:
        """A state whose every value is its step."""
        whole = torch.full((ROWS, self._size), float(step))
        return [
            component("shards", "sharded", Box(rows=distribute_tensor(whole, self.mesh, [Shard(0)]), step=step)),
            component("replica", "replicated", Box(value=torch.full((8,), float(step)))),
            component("rng", "per_rank", Box(rank=RANK, step=step)),
        ]

    def save(self, step: int) -> None:
        self.checkpoints.save(SaveRequest(step, self.parts(step), {}, extra={"line": "a"}))

    def found(self, accepts: Any = lambda manifest: True) -> dict[str, Any] | None:
        """The newest state, loaded; each value must be of one step."""
        info = self.checkpoints.find(accepts)
        if info is None:
            return None
        parts = self.parts(0)
        CheckpointManager(self.parent / "unused", self.world).load(info, parts)
        rows, replica, rng = (one.stateful.state_dict() for one in parts)
        assert isinstance(rows["rows"], DTensor)
        values = {*rows["rows"].to_local().flatten().tolist(), *replica["value"].tolist(), float(rows["step"])}
        return {"step": info.step, "values": sorted(values), "rng": rng, "files": sorted(files_of(info.path))}

    def lose(self, *nodes: int) -> None:
        """Delete what nodes have; collective."""
        self.world.barrier()
        if RANK in nodes:
            for path in self.memory.directory.iterdir():
                shutil.rmtree(path)
        self.world.barrier()

    def everything(self) -> list[list[str]]:
        """The files that each node has."""
        gathered: list[list[str]] = self.world.gather(sorted(files_of(self.memory.directory)))
        return gathered


def files_of(directory: Path) -> list[str]:
    return [path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()]


def job_together(settings: dict[str, Any]) -> dict[str, Any]:
    """What three nodes do that lose some of them."""
    logging.basicConfig(filename=f"rank-{RANK}.log", level=logging.WARNING)
    found: dict[str, Any] = {}
    with ranks() as world:
        for is_async in (False, True):
            nodes = Nodes(world, Path(settings["memory"]), is_async=is_async)
            nodes.checkpoints.drop()
            for step in (1, 2):
                nodes.save(step)
            nodes.checkpoints.finalize()
            found[f"kept, async {is_async}"] = [*nodes.kept]
            found[f"files, async {is_async}"] = nodes.everything()
            for lost in range(3):
                nodes.save(3 + lost)
                nodes.checkpoints.finalize()
                nodes.lose(lost)
                found[f"without {lost}, async {is_async}"] = nodes.found()
            nodes.checkpoints.close()
        nodes = Nodes(world, Path(settings["memory"]))
        found["other line"] = [nodes.checkpoints.newest, nodes.found(lambda manifest: manifest.extra["line"] == "b")]
        nodes.save(3)
        damage(nodes, "checkpoint-3/replica/replica.safetensors", on=0)
        found["damaged"] = nodes.found()
        nodes.save(4)
        nodes.lose(0, 1)
        found["two lost"] = nodes.found()
        nodes.save(5)
        found["no space"] = without_space(nodes)
        nodes.checkpoints.close()
        nodes.checkpoints.remove()
        found["left"] = [nodes.memory.directory.exists()]
        os.environ["GROUP_RANK"] = str(RANK)
        found["same memory"] = outcome(lambda: open_node_memory(world, Path(settings["memory"]), "shared"))
    return found


def damage(nodes: Nodes, name: str, *, on: int) -> None:
    """Change one bit of a file of a node. Collective."""
    if on == RANK:
        path = nodes.memory.directory / name
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
    nodes.world.barrier()


def without_space(nodes: Nodes) -> dict[str, Any]:
    """A save for which the nodes have no space leaves the state before it."""
    size = 2 * nodes.memory.free_bytes
    sparse = nodes.own / "sparse"
    with sparse.open("wb") as file:
        file.truncate(size)  # a hole, which takes no memory
    big = Box(value=torch.from_file(str(sparse), shared=True, size=size, dtype=torch.uint8))
    nodes.checkpoints.save(SaveRequest(6, [component("big", "per_rank", big)], {}, extra={"line": "a"}))
    sparse.unlink()
    return {"kept": nodes.kept, "found": nodes.found()}


def job_found(settings: dict[str, Any]) -> dict[str, Any] | None:
    """The newest state."""
    with ranks() as world:
        nodes = Nodes(world, Path(settings["memory"]), size=settings.get("size", 1))
        return nodes.found()


def job_forever(settings: dict[str, Any]) -> None:
    """Continue from the newest state, and save one after the other until killed; a file says what has begun."""
    with ranks() as world:
        nodes = Nodes(world, Path(settings["memory"]), size=settings["size"], is_async=settings["is_async"])
        found = nodes.found()
        for step in itertools.count(1 if found is None else found["step"] + 1):
            note(f"begun {step}")
            nodes.save(step)
            if settings["is_async"]:
                nodes.checkpoints.finalize()
            note(f"kept {step}")


def note(text: str) -> None:
    if RANK == 0:
        with Path("steps.txt").open("a") as file:
            file.write(f"{text}\n")
