"""Plain data parallelism: every rank holds the whole model and gradients are averaged."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from onstep.config import DistributedDataParallelConfig
from onstep.distributed.world import World

# torch 2.13 renamed the argument; the old name goes when 2.13 is the oldest supported
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if _RENAMED else "broadcast_buffers"


def data_parallel(chunks: list[nn.Module], world: World, config: DistributedDataParallelConfig) -> list[nn.Module]:
    """Wrap the chunks so that the backward pass averages gradients over the ranks; a world of one stays as it is.

    Collective: weights are broadcast from rank 0.
    """
    if world.size == 1:
        return chunks
    device_ids: list[Any] | None = [world.device] if world.device.type == "cuda" else None
    sync_buffers: dict[str, Any] = {_SYNC_BUFFERS: config.broadcast_buffers}
    return [
        DistributedDataParallel(
            chunk,
            device_ids=device_ids,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters,
            **sync_buffers,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
        )
        for chunk in chunks
    ]


def no_sync(chunks: list[nn.Module]) -> AbstractContextManager[object]:
    """Backward passes in this context keep their gradients local; the next one outside averages the sum.

    With a static graph, which torch cannot combine with that, each of them averages the sum.
    """
    wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel) and not chunk.static_graph]
    if not wrapped:
        return nullcontext()
    stack = ExitStack()
    for chunk in wrapped:
        stack.enter_context(chunk.no_sync())
    return stack
