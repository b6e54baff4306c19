"""What each rank of the checkpoint tests runs: `job_*(settings)`."""

from __future__ import annotations

import errno
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from onstep.checkpoint import (
    CheckpointManager,
    FileStore,
    Operation,
    SaveRequest,
    SharingPattern,
    StateComponent,
    checkpoints,
)
from onstep.config import DistributedInitConfig
from onstep.distributed import World, open_world
from onstep.errors import OnstepError

RANK = int(os.environ["RANK"])


class Box:
    """A state of any content; fails where it holds an error."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self.content.get("error"), Exception):
            raise self.content["error"]
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if isinstance(self.content.get("error"), Exception):
            raise self.content["error"]
        self.content = state_dict


def component(key: str, pattern: str, box: Box, **options: Any) -> StateComponent:
    return StateComponent(key, box, SharingPattern(pattern), **options)


def outcome(work: Callable[[], Any]) -> str:
    """The error that the work ends with, as text; what it gives if it ends well."""
    try:
        return f"{work()}"
    except OnstepError as error:
        return f"{type(error).__name__}: {error}"


def failing_store(fails: Callable[[Operation], bool]) -> FileStore:
    def on_operation(operation: Operation) -> None:
        if fails(operation):
            raise OSError(errno.ENOSPC, "No space left on device")

    return FileStore(on_operation)


def patterns(world: World, directory: Path) -> dict[str, Any]:
    """Every pattern, on two ranks that count as two machines, in one group of both and one group each."""
    os.environ["GROUP_RANK"] = str(RANK)
    own = [dist.new_group([rank]) for rank in range(2)][RANK]
    groups = {"pair": dist.new_group([0, 1]), "own": own}

    def parts(value: int) -> list[StateComponent]:
        def box() -> Box:
            return Box(value=torch.tensor([value, RANK]))

        return [
            component("shared", "global", box()),
            component("replica", "replicated", box()),
            component("rank", "per_rank", box()),
            component("node", "per_node", box()),
            component("pair", "per_group", box(), process_group_name="pair"),
            component("own", "per_group", box(), process_group_name="own"),
        ]

    notified: list[int] = []
    for is_async in (False, True):
        manager = CheckpointManager(
            directory / "c",
            world,
            async_save=is_async,
            groups=groups,
            on_durable=lambda saved: notified.append(saved.step),
        )
        manager.save(SaveRequest(1 + is_async, parts(7), {}))
        manager.finalize()
        manager.close()
    fresh = parts(0)
    info = manager.newest()
    assert info is not None
    report = manager.load(info, fresh)
    return {
        "told": notified,
        "step": info.step,
        "loaded": {one.key: one.stateful.state_dict()["value"].tolist() for one in fresh},
        "other_ranks": report.other_ranks,
        "ranks": {key: entry.ranks for key, entry in info.manifest.components.items()},
        "files": sorted(path for path in info.manifest.files if path.endswith("json")),
    }


def failures(world: World, directory: Path) -> dict[str, Any]:
    """What goes wrong on rank 1 only; each time both ranks must hear of it."""
    on_rank_1 = RANK == 1
    root, found = directory / "c", {}
    manager = CheckpointManager(root, world)
    manager.save(SaveRequest(1, [component("a", "per_rank", Box(value=1))], {}))

    def trial(name: str, parts: list[StateComponent], **options: Any) -> None:
        trial_manager = CheckpointManager(root, world, **options)

        def save() -> str:
            trial_manager.save(SaveRequest(2, parts, {}))
            trial_manager.finalize()
            return "saved"

        found[name] = outcome(save)
        trial_manager.close()
        world.barrier()  # rank 0 removes the directory while rank 1 raises already
        found[f"{name}: steps"] = [one.step for one in checkpoints(root)]
        found[f"{name}: debris"] = sorted(path.name for path in root.iterdir() if path.name.startswith("."))
        world.barrier()

    box = Box(value=torch.ones(10))
    full_disk = failing_store(lambda operation: on_rank_1 and operation.kind == "write")
    for is_async in (False, True):
        trial(f"disk, async {is_async}", [component("a", "per_rank", box)], store=full_disk, async_save=is_async)
    trial("continue", [component("a", "per_rank", box)], store=full_disk, on_save_error="continue")
    failing = Box(error=RuntimeError("no state today")) if on_rank_1 else box
    trial("state", [component("a", "per_rank", failing)])
    trial("keys", [component("a", "global", box)] * (2 if on_rank_1 else 1))
    trial(
        "group",
        [component("a", "per_group", box, process_group_name="dp")],
        groups={"dp": None} if not on_rank_1 else {},
    )
    found["load"] = outcome(
        lambda: manager.load(checkpoints(root)[0], [component("a", "per_rank", failing, required=False)])
    )
    world.barrier()
    trial("optional", [component("b", "global", box), component("a", "per_rank", failing, required=False)])
    info = manager.newest()
    assert info is not None
    found["optional: ranks"] = info.manifest.components["a"].ranks
    return found


def replication(world: World, directory: Path) -> dict[str, Any]:
    """Replicas that differ in a late value of a tensor, or in a plain value, on rank 1."""
    found = {}
    states = {
        "same": {"layers": [{"w": torch.zeros(50)}], "lr": 0.1},
        "tensor": {"layers": [{"w": torch.zeros(50).index_fill(0, torch.tensor([30]), float(RANK))}], "lr": 0.1},
        "value": {"layers": [{"w": torch.zeros(50)}], "lr": 0.1 + RANK},
        "no form": {"kinds": {object()} if RANK else {1}},
    }
    for name, state in states.items():
        for level in ("none", "quick", "tensor", "full"):
            part = component("model", "replicated", Box(**state), validate_replication=True, validation_level=level)
            manager = CheckpointManager(directory / f"{name}-{level}", world)
            found[f"{name}-{level}"] = outcome(lambda m=manager, p=part: m.save(SaveRequest(1, [p], {})))  # type: ignore[misc]
    return found


def two_saves(world: World, directory: Path, rank: int | None = None, kind: str = "") -> dict[str, Any]:
    """Two saves; `rank` dies by SIGKILL at an operation of the second."""
    step = 0

    def on_operation(operation: Operation) -> None:
        if step == 2 and rank == RANK and operation.kind == kind:
            os.kill(os.getpid(), signal.SIGKILL)

    manager = CheckpointManager(directory / "c", world, store=FileStore(on_operation))
    for step in (1, 2):
        parts = [
            component("model", "replicated", Box(value=torch.full((10,), float(step)))),
            component("rng", "per_rank", Box(rank=RANK, step=step)),
        ]
        manager.save(SaveRequest(step, parts, {}))
    return {}


def resumed(world: World, directory: Path) -> dict[str, Any]:
    """A start from them."""
    manager = CheckpointManager(directory / "c", world)
    model, rng = Box(), Box()
    info = manager.newest()
    assert info is not None
    report = manager.load(info, [component("model", "replicated", model), component("rng", "per_rank", rng)])
    value = model.content["value"].tolist()
    return {"step": info.step, "model": value, "rng": rng.content, "other": report.other_ranks}


def job_together(settings: dict[str, Any]) -> dict[str, Any]:
    """Jobs that end well, in one launch."""
    directory = Path.cwd()
    with ranks() as world:
        two_saves(world, directory)
        jobs = {"failures": failures, "replication": replication, "patterns": patterns}
        return {name: job(world, directory / name) for name, job in jobs.items()}


def job_two_saves(settings: dict[str, Any]) -> None:
    with ranks() as world:
        two_saves(world, Path.cwd(), settings["rank"], settings["kind"])


def job_resumed(settings: dict[str, Any]) -> dict[str, Any]:
    with ranks() as world:
        return resumed(world, Path.cwd())


def job_close(settings: dict[str, Any]) -> None:
    """Begin an asynchronous save and close without finalising it, as after an error."""
    logging.basicConfig(filename=f"rank-{RANK}.log", level=logging.WARNING)
    with ranks() as world:
        manager = CheckpointManager(Path.cwd() / "checkpoints", world, async_save=True)
        manager.save(SaveRequest(1, [component("value", "per_rank", Box(value=1))], {}))
        if not world.is_main:
            manager.close()
        world.barrier()  # rank 0 removes the directory that the other may still write into
        manager.close()


def job_reshard(settings: dict[str, Any]) -> None:
    """Load the tensors of a directory of ours through DCP, sharded over all ranks, and check them."""
    with ranks() as world:
        mesh = init_device_mesh("cpu", (world.size,))
        state: dict[str, DTensor] = {
            "rows": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)]),
            "columns": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]),
        }
        state_dict_loader.load(state, storage_reader=HuggingFaceStorageReader(settings["folder"]))
        expected = torch.arange(20.0).reshape(5, 4)
        for name, tensor in state.items():
            assert tensor.to_local().numel() < expected.numel(), f"{name} is not sharded"
            assert torch.equal(tensor.full_tensor(), expected), name


@contextmanager
def ranks() -> Iterator[World]:
    world = open_world(DistributedInitConfig(device="cpu"))
    yield world
    world.close()
