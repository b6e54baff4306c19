"""What the ranks of the tests of checkpoints in shards run: `job_*(settings)`."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from onstep.checkpoint import (
    CheckpointManager,
    ModelState,
    SaveRequest,
    SharingPattern,
    StateComponent,
    checkpoints,
    read_tensors,
    resolve,
    write_tensors,
)
from onstep.checkpoint.format.tensor_file import read_file_header
from onstep.checkpoint.format.tensor_header import sharding_of
from onstep.checkpoint.loading import load_model
from onstep.config import DistributedInitConfig
from onstep.distributed import World, open_world
from onstep.distributed.shards import held_part, is_sharded, whole
from onstep.errors import CheckpointError
from onstep.training.checkpointing.optimizer_state import OptimizerState

VOCABULARY, WIDTH, STEPS = 67, 12, 3


class Small(nn.Module):
    """Tied embeddings of a size that no number of ranks divides, a bias that has fewer items than ranks, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)) for _ in range(2))
        self.out = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


def laid_out(layout: str, world: World, seed: int = 0) -> nn.Module:
    """The model, as a layout divides it: `one`, `ddp2`, `fsdp2`, `hsdp4`."""
    torch.manual_seed(seed)
    model: nn.Module = Small()
    if layout.startswith("ddp"):
        return DistributedDataParallel(model)
    if layout != "one":
        shape = (2, world.size // 2) if layout.startswith("hsdp") else (world.size,)
        names = ("dp_replicate", "dp_shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


class ByName:
    """The state of an optimizer by the names of its parameters, as torch gives it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state_dict)


class Training:
    """A model on a layout, and its optimizer."""

    def __init__(self, layout: str, world: World, seed: int = 0) -> None:
        self.model = laid_out(layout, world, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        sharded = is_sharded(self.model.parameters())
        self.pattern = SharingPattern.SHARDED if sharded else SharingPattern.REPLICATED

    def components(self) -> list[StateComponent]:
        return [
            StateComponent("model", ModelState([self.model]), self.pattern),
            StateComponent("optimizer", ByName(self.model, self.optimizer), self.pattern),
        ]

    def steps(self, first: int, count: int) -> list[float]:
        """The losses of steps with the same samples on each rank, so that layouts differ in what they hold only."""
        losses = []
        for step in range(first, first + count):
            tokens = torch.randint(VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(step))
            self.optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def digests(self) -> dict[str, str]:
        """A hash of each whole tensor. Collective."""
        states = {component.key: component.stateful.state_dict() for component in self.components()}
        return digests_of(states, "states")


def digests_of(state: Any, path: str) -> dict[str, str]:
    """A hash of each whole tensor of a state. Collective."""
    found = {}
    for name, value in leaves(state, path):
        if isinstance(value, Tensor):
            content = whole(value).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            found[name] = hashlib.sha256(content).hexdigest()[:16]
    return found


def leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None:
        yield path, state
    else:
        for key, item in items:
            yield from leaves(item, f"{path}.{key}")


def planes_that_come_back(world: World) -> list[bool]:
    """Whether tensors that are divided along two axes come back on another layout, for each way to divide them."""
    mesh = init_device_mesh("cpu", (2, 2))
    plane, by_rows, found = torch.arange(35.0).reshape(5, 7), [Replicate(), Shard(0)], []
    for ways in ([Shard(0), Shard(1)], [Shard(1), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]):
        manager = CheckpointManager(Path("planes"), world)
        parts, others = (
            Parts(t=distribute_tensor(values, mesh, placements))
            for values, placements in ((plane, ways), (torch.zeros(5, 7), by_rows))
        )
        manager.save(SaveRequest(1, [StateComponent("plane", parts, SharingPattern.SHARDED)], {}))
        manager.load(resolve(manager.root), [StateComponent("plane", others, SharingPattern.SHARDED)])
        found.append(torch.equal(whole(others.tensors["t"]), plane))
    return found


def optimizer_of_before(training: Training, world: World) -> bool:
    """Whether the state of an optimizer as it was saved before, by number, goes to the parts of the parameters."""
    torch.manual_seed(0)
    plain = Small()
    saved = torch.optim.AdamW(plain.parameters())
    for parameter in plain.parameters():
        parameter.grad = torch.randn_like(parameter)
    saved.step()
    manager = CheckpointManager(Path("before"), world)
    manager.save(SaveRequest(1, [StateComponent("optimizer", saved, SharingPattern.REPLICATED)], {}))
    fresh = torch.optim.AdamW(training.model.parameters())
    state = OptimizerState(fresh, [training.model])
    manager.load(resolve(manager.root), [StateComponent("optimizer", state, SharingPattern.SHARDED)])
    pairs = zip(plain.parameters(), training.model.parameters(), strict=True)
    return all(
        is_sharded([fresh.state[new]["exp_avg"]])
        and torch.equal(whole(fresh.state[new]["exp_avg"]), saved.state[old]["exp_avg"])
        for old, new in pairs
    )


def error_of_other_replicas(training: Training, world: World) -> str | None:
    """The error of a save in which a rank holds something else than the other rank with the same part."""
    if world.rank == 3:
        held_part(training.model.embed.weight)[-1].zero_()
    model, _ = training.components()
    request = SaveRequest(STEPS + 1, [replace(model, validate_replication=True)], {})
    return outcome(lambda: CheckpointManager(Path("replicas"), world).save(request))


@contextmanager
def world_of_ranks() -> Iterator[World]:
    world = open_world(DistributedInitConfig(device="cpu"))
    try:
        yield world
    finally:
        world.close()


class Parts:
    """A state of tensors."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return self.tensors

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tensors = state_dict


def rewritten(path: Path, row: int, more_rows: int) -> None:
    """Move the parts in a file to another row of tensors with more of them."""
    header = read_file_header(path)
    sharding, tensors = sharding_of(str(path), header), read_tensors(path)
    offsets = {name: (row, *at[1:]) for name, (at, _) in sharding.items()}
    shapes = {name: (full[0] + more_rows, *full[1:]) for name, (_, full) in sharding.items() if full is not None}
    with path.open("wb") as file:
        write_tensors(file, tensors, header.metadata, offsets=offsets, full_shapes=shapes)


def spoil(how: str, root: Path) -> None:
    """Spoil a file of the checkpoint of step 4."""
    path = root / "checkpoint-4" / "model" / "rank_1.safetensors"
    if how == "another step":
        shutil.copy(root / "checkpoint-3" / "model" / "rank_1.safetensors", path)
    elif how == "truncated":
        path.write_bytes(path.read_bytes()[:-12])
    elif how == "lost":
        path.unlink()
    else:
        rewritten(path, 0, 1 if how == "shape" else 0)


def job_spoiled(settings: dict[str, Any]) -> dict[str, Any]:
    """The errors of loading checkpoints whose files do not belong together, and whether anything has changed then."""
    found: dict[str, Any] = {}
    with world_of_ranks() as world:
        training = Training("fsdp2", world)
        own = CheckpointManager(Path("whole"), world)
        planner, found["plans"] = DefaultSavePlanner.create_global_plan, 0

        def counted(*arguments: Any) -> Any:
            found["plans"] += 1
            return planner(*arguments)

        DefaultSavePlanner.create_global_plan = counted  # type: ignore[method-assign]
        for step in (3, 4):
            training.steps(step, 1)
            own.save(SaveRequest(step, training.components(), {}))
        DefaultSavePlanner.create_global_plan = planner  # type: ignore[method-assign]
        training.steps(5, 1)
        before = training.digests()
        for how in settings["cases"]:
            if world.is_main:
                shutil.copytree("whole", how)
                spoil(how, Path(how))
            world.barrier()
            info = checkpoints(Path(how))[0]
            found[how] = outcome(partial(CheckpointManager(Path(how), world).load, info, training.components()))
            found[f"{how} verified"] = outcome(partial(resolve, info.path))
        found["unchanged"] = training.digests() == before
        weights = {"a": training.model.embed.weight, "b": training.model.blocks[0][0].weight}
        one, both = (
            StateComponent("parts", Parts(**kept), SharingPattern.SHARDED) for kept in ({"a": weights["a"]}, weights)
        )
        parts = CheckpointManager(Path("parts"), world)
        parts.save(SaveRequest(1, [one], {}))
        other = laid_out("fsdp2", world)
        fully_shard(other.blocks.append(nn.Linear(WIDTH, WIDTH))[-1], mesh=init_device_mesh("cpu", (world.size,)))
        other(torch.zeros(1, 2, dtype=torch.long))  # torch adds hooks for loading at the first step
        of_other = StateComponent("model", ModelState([other]), SharingPattern.SHARDED)
        found["another model"] = outcome(partial(own.load, checkpoints(own.root)[0], [of_other]))
        found["before"] = optimizer_of_before(training, world)
        found["unfilled"] = outcome(partial(parts.load, checkpoints(Path("parts"))[0], [both]))
    return found


def outcome(work: Callable[[], object]) -> str | None:
    try:
        work()
    except CheckpointError as error:
        return str(error)
    return None


def job_cross(settings: dict[str, Any]) -> dict[str, Any]:
    """Save layouts, and load others: what is in them, and the losses after it."""
    result: dict[str, Any] = {}
    with world_of_ranks() as world:
        for layout in settings.get("saves", []):
            training = Training(layout, world)
            training.steps(0, STEPS)
            manager = CheckpointManager(Path(layout), world, async_save=settings.get("async", False))
            manager.save(SaveRequest(STEPS, training.components(), {}))
            digests = training.digests()
            losses = training.steps(STEPS, 2)
            manager.finalize()
            manager.close()
            result[layout] = {"digests": digests, "losses": losses}
            if layout.startswith("hsdp"):
                result[layout]["said"] = error_of_other_replicas(training, world)
                result[layout]["planes"] = planes_that_come_back(world)
        for source, layout in settings.get("loads", []):
            training = Training(layout, world, seed=1)
            manager = CheckpointManager(Path(source), world)
            manager.load(resolve(Path(source)), training.components())
            result[f"{source} {layout}"] = {"digests": training.digests(), "losses": training.steps(STEPS, 2)}
        if settings.get("loads"):
            source, layout = settings["loads"][-1]
            alone = ModelState([laid_out(layout, world, seed=2)])
            load_model(resolve(Path(source)), alone)
            result["weights alone"] = digests_of(alone.state_dict(), "states.model")
    return result
