"""What each rank does with the axes and the shares of samples of a world: `job_*(settings)`."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch
import torch.distributed as dist

from onstep.config import DistributedInitConfig
from onstep.distributed import ParallelSizes, World, open_world


def opened(settings: dict[str, Any]) -> World:
    return open_world(DistributedInitConfig(device="cpu"), ParallelSizes(**settings["sizes"]))


def num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def job_shares(settings: dict[str, Any]) -> dict[str, Any]:
    """What the collectives over shares of samples give, each rank contributing its number plus 1."""
    with closing(opened(settings)) as world:
        own = torch.tensor([world.rank + 1.0])
        return {
            "data": [world.data.rank, world.data.size],
            "sum": world.data.sum(own.clone()).item(),
            "sum_losses": world.data.sum_losses(own.clone()).item(),
            "max": world.data.max(own.clone()).item(),
            "gathered": world.data.gather(world.rank),
            "numbers": world.data.gather_numbers([float(world.rank)]),
            "all": world.sum(own.clone()).item(),
            "place": world.place(),
            "groups": num_groups(),
        }


def job_axes(settings: dict[str, Any]) -> dict[str, Any]:
    """The ranks along each axis of both meshes, and the groups that exist before, with, and after them."""
    dist.init_process_group("gloo")
    with closing(opened(settings)) as world:
        before, meshes = num_groups(), (world.mesh, world.expert_mesh)
        along = {}
        for mesh in meshes:
            assert mesh.mesh_dim_names is not None
            for axis in mesh.mesh_dim_names:
                group = mesh.get_group(axis)
                total = torch.tensor([1])
                dist.all_reduce(total, group=group)
                assert group is world.group(axis)
                assert total.item() == mesh[axis].size()
                along[axis] = dist.get_process_group_ranks(group)
        along["mp"] = dist.get_process_group_ranks(world.group("pp", "tp"))
        hybrid = mesh_of_two(world)
        during = num_groups()
    after = num_groups()
    dist.destroy_process_group()
    return {"along": along, "hybrid": hybrid, "groups": [before, during, after]}


def mesh_of_two(world: World) -> list[list[int]]:
    """The slice of the mesh that FSDP2 takes for replicas of shards."""
    sliced: list[list[int]] = world.mesh["dp_replicate", "dp_shard"].mesh.tolist()
    return sliced
