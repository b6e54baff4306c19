"""What the ranks of the tests of collectives on rank 0 alone run: `job_*(settings)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from onstep import Callback, pretrain
from onstep.config import DistributedInitConfig
from onstep.distributed import open_world
from onstep.errors import MainOnlyError, OnstepError
from tests.support.small_configs import small_pretrain_config

WIDTH = 8


def _collectives() -> dict[str, Callable[[], object]]:
    """Each of them as a callback may call it, by the name that an error gives it and a number."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    sharded = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    for layer in sharded:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    replicated = DistributedDataParallel(nn.BatchNorm1d(WIDTH))
    weight, one, rows = distribute_tensor(torch.ones(size, 2), mesh, [Shard(0)]), torch.ones(1), torch.ones(2, WIDTH)
    return {
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "allreduce": lambda: dist.all_reduce(one),
        "allreduce async": lambda: dist.all_reduce(one, async_op=True),
        "allreduce of a sum": lambda: weight.sum().full_tensor(),
        "allgather_into_tensor_coalesced": weight.full_tensor,
        "allgather_base": lambda: sharded(rows),
        "broadcast": lambda: replicated(rows),
        "broadcast of objects": lambda: dist.broadcast_object_list([1], src=0),
        "allgather": lambda: dist.all_gather_object([None] * size, 1),
        "allgather of gather_object": lambda: dist.gather_object(1, [None] * size),
        "alltoall_base": lambda: dist.all_to_all_single(torch.ones(size), torch.ones(size)),
        "reduce": lambda: dist.reduce(one, 0),
        "send": lambda: dist.send(one, 1),
        "recv": lambda: dist.recv(one, 1),
        "new_group": lambda: dist.new_group([0]),
    }


def job_collectives(settings: dict[str, Any]) -> dict[str, Any]:
    """What rank 0 gets for each of them alone, and what all ranks together get afterwards."""
    world = open_world(DistributedInitConfig(device="cpu", distributed_timeout_minutes=0.5))
    collectives = _collectives()
    alone = [dist.new_group([rank]) for rank in range(world.size)][world.rank]
    refused, harmless = {}, []
    for name, call in collectives.items() if world.is_main else ():
        try:
            with world.main_only("the test", "leave it out"):
                call()
        except MainOnlyError as error:
            refused[name] = str(error)
    with world.main_only("the test"):
        dist.all_reduce(torch.ones(1), group=alone)
        dist.broadcast_object_list([1], src=world.rank, group=alone)
        dist.barrier(group=alone)
        own = dist.new_group([world.rank], use_local_synchronization=True)
        dist.barrier(group=own)
        layer = nn.Linear(WIDTH, 1)
        layer(torch.ones(2, WIDTH)).sum().backward()
        harmless.append(layer.weight.grad is not None)
    total = torch.ones(1)
    dist.all_reduce(total)
    whole: Any = collectives["allgather_into_tensor_coalesced"]()
    agreed = world.agree([world.rank])
    dist.new_group(list(range(world.size)))
    world.close()
    return {"refused": refused, "harmless": harmless, "sum": total.item(), "whole": whole.shape[0], "agreed": agreed}


class MainOnly(Callback):
    """Calls a collective on rank 0 alone, as a user might."""

    ranks = "main"
    collective: str = "barrier"

    def meet(self, context: Any) -> None:
        if self.collective == "barrier":
            dist.barrier()
        else:
            context.state.world.sum(torch.ones(1))


def job_callback(settings: dict[str, Any]) -> dict[str, Any]:
    """How a run ends whose callback does it at an event."""
    config = small_pretrain_config(settings["corpus"], settings["cache"])
    config.train.train_iters = 2
    config.dist.distributed_timeout_minutes = 2
    seen: list[Any] = []

    class Watching(Callback):
        def on_step_end(self, context: Any) -> None:
            seen.append(context.step)

        def on_run_end(self, context: Any) -> None:
            seen.append(context.reason)

    options = settings.get("options", {})
    exporter: Any = type("Exporter", (MainOnly,), {settings["event"]: MainOnly.meet, **options})
    try:
        pretrain(config, callbacks=[exporter, Watching()])
    except OnstepError as error:
        notes = getattr(error, "__notes__", [])
        return {"error": type(error).__name__, "text": str(error), "notes": notes, "seen": seen}
    return {"error": None, "seen": seen}
