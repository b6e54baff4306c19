"""What the ranks of the tests of fingerprints, trajectory hashes and compared replicas run: `job_*(settings)`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from onstep.distributed import ParallelSizes, World
from onstep.distributed.shards import local_part
from onstep.errors import ReplicaMismatchError
from onstep.training.verification.fingerprint import fingerprint
from onstep.training.verification.trajectory_hash import HashChain
from onstep.training.verification.weight_hash import check_param_hashes_across_dp_replicas

SHAPES = ((67, 6), (3,), (5, 4, 3), (1, 40000))
"""Not divisible by the ranks, smaller than their number, and longer than what is mixed at a time."""


class Odd(nn.Module):
    """Parameters of several shapes and types, one of them frozen and one used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in SHAPES])
        self.all[1].requires_grad_(False)
        self.tied = self.all[0]


def hsdp_mesh() -> DeviceMesh:
    shape, names = (2, dist.get_world_size() // 2), ("dp_replicate", "dp_shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def sharded(how: str, model: nn.Module) -> nn.Module:
    """The model as its ranks hold it."""
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp":
        return fully_shard(model)
    if how == "fsdp but for one":
        return fully_shard(model, ignored_params={next(model.parameters())})
    if how == "hsdp":
        return fully_shard(model, mesh=hsdp_mesh())
    return model


def with_other_dimensions(model: nn.Module) -> list[Tensor]:
    """The parameters, each cut along its last dimension over all ranks, or along its last two over a mesh."""
    size = dist.get_world_size()
    mesh = hsdp_mesh() if size == 4 else init_device_mesh("cpu", (size,))
    cut = [Shard(-2), Shard(-1)] if size == 4 else [Shard(-1)]
    return [
        distribute_tensor(one.detach(), mesh, [Shard(one.ndim + of.dim) for of in cut]) if one.ndim > 1 else one
        for one in model.parameters()
    ]


def world_of_group() -> World:
    if dist.is_initialized():
        return World(rank=dist.get_rank(), size=dist.get_world_size())
    return World()


def job_fingerprint(settings: dict[str, Any]) -> str:
    """The fingerprint of the same weights in a layout, with one bit of the last parameter changed if asked for."""
    if settings["how"] != "one":
        dist.init_process_group("gloo")
    model = Odd()
    if settings.get("changed"):
        model.all[-1].data[0, -1] += 1
    tensors: Iterable[Tensor] = model.parameters()
    tensors = (
        with_other_dimensions(model) if settings["how"] == "dims" else sharded(settings["how"], model).parameters()
    )
    return fingerprint(tensors, world_of_group())


def job_chain(settings: dict[str, Any]) -> list[Any]:
    """The records of two steps; in the second, one rank has changed a weight that other ranks hold, too."""
    dist.init_process_group("gloo")
    world, model = world_of_group(), sharded(settings["how"], Odd())
    optimizer, chain = torch.optim.SGD(model.parameters(), lr=0.5), HashChain(None, world)
    records = [chain.extend(1, [world.rank], optimizer, torch.tensor(2.5), [model])]
    if world.rank == settings["drifts"]:
        local_part(next(model.parameters()).detach())[0] += 1
    return [*records, chain.extend(2, [0], optimizer, torch.tensor(1.5), [model]), chain.state_dict()]


def job_compared(settings: dict[str, Any]) -> list[str | None]:
    """What the comparison of replicas says of equal ones, and after ranks have changed weights that they hold."""
    dist.init_process_group("gloo")
    size, how = dist.get_world_size(), settings["how"]
    sizes = ParallelSizes(dp_replicate=2, dp_shard=size // 2) if how == "hsdp" else ParallelSizes(dp_replicate=size)
    world, model = World(rank=dist.get_rank(), size=size, sizes=sizes), sharded(how, Odd())
    said = [_mismatch(model, world)]
    if world.rank in settings["drifts"]:
        for parameter in list(model.parameters())[:2]:
            local_part(parameter.detach())[:1] += 1
    return [*said, _mismatch(model, world)]


def _mismatch(model: nn.Module, world: World) -> str | None:
    try:
        check_param_hashes_across_dp_replicas([model], world, 7)
    except ReplicaMismatchError as error:
        return str(error)
    return None
