"""What each rank of the checkpoint tests runs: `checkpoint_rank_script.py JOB FOLDER SETTINGS`."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from onstep.checkpoint import (
    CheckpointManager,
    FileStore,
    Operation,
    SaveRequest,
    SharingPattern,
    StateComponent,
    checkpoints,
)
from onstep.config.parts import DistributedInitConfig
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


def job_patterns(world: World, folder: Path) -> dict[str, Any]:
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

    told: list[int] = []
    for is_async in (False, True):
        manager = CheckpointManager(
            folder / "c", world, async_save=is_async, groups=groups, on_durable=lambda saved: told.append(saved.step)
        )
        manager.save(SaveRequest(1 + is_async, parts(7), {}))
        manager.finalize()
        manager.close()
    fresh = parts(0)
    info = manager.newest()
    assert info is not None
    report = manager.load(info, fresh)
    return {
        "told": told,
        "step": info.step,
        "loaded": {one.key: one.stateful.state_dict()["value"].tolist() for one in fresh},
        "other_ranks": report.other_ranks,
        "ranks": {key: entry.ranks for key, entry in info.manifest.components.items()},
        "files": sorted(path for path in info.manifest.files if path.endswith("json")),
    }


def job_failures(world: World, folder: Path) -> dict[str, Any]:
    """What goes wrong on rank 1 only; each time both ranks must hear of it."""
    on_rank_1 = RANK == 1
    root, found = folder / "c", {}
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
        world.barrier()  # rank 0 removes the folder while rank 1 raises already
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


def job_replication(world: World, folder: Path) -> dict[str, Any]:
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
            manager = CheckpointManager(folder / f"{name}-{level}", world)
            found[f"{name}-{level}"] = outcome(lambda m=manager, p=part: m.save(SaveRequest(1, [p], {})))  # type: ignore[misc]
    return found


def job_two_saves(world: World, folder: Path, rank: int | None = None, kind: str = "") -> dict[str, Any]:
    """Two saves; `rank` dies by SIGKILL at an operation of the second."""
    step = 0

    def on_operation(operation: Operation) -> None:
        if step == 2 and rank == RANK and operation.kind == kind:
            os.kill(os.getpid(), signal.SIGKILL)

    manager = CheckpointManager(folder / "c", world, store=FileStore(on_operation))
    for step in (1, 2):
        parts = [
            component("model", "replicated", Box(value=torch.full((10,), float(step)))),
            component("rng", "per_rank", Box(rank=RANK, step=step)),
        ]
        manager.save(SaveRequest(step, parts, {}))
    return {}


def job_resumed(world: World, folder: Path) -> dict[str, Any]:
    """A start from them."""
    manager = CheckpointManager(folder / "c", world)
    model, rng = Box(), Box()
    info = manager.newest()
    assert info is not None
    report = manager.load(info, [component("model", "replicated", model), component("rng", "per_rank", rng)])
    value = model.content["value"].tolist()
    return {"step": info.step, "model": value, "rng": rng.content, "other": report.other_ranks}


def job_together(world: World, folder: Path) -> dict[str, Any]:
    """Jobs that end well, in one launch."""
    jobs = {"failures": job_failures, "replication": job_replication, "patterns": job_patterns}
    job_two_saves(world, folder)
    return {name: job(world, folder / name) for name, job in jobs.items()}


def main() -> None:
    job, folder, settings = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    world = open_world(DistributedInitConfig(device="cpu"))
    result = globals()[f"job_{job}"](world, folder, **settings)
    world.close()
    (folder / f"rank-{RANK}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
