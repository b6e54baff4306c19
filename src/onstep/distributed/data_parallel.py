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
        FixedBuckets(
            chunk,
            device_ids=device_ids,
            bucket_cap_mb=config.bucket_cap_mb,
            find_unused_parameters=config.find_unused_parameters and not config.static_graph,  # which finds them once
            **sync_buffers,
            gradient_as_bucket_view=config.gradient_as_bucket_view,
            static_graph=config.static_graph,
        )
        for chunk in chunks
    ]


class FixedBuckets(DistributedDataParallel):
    """Data parallelism whose gradient buckets are the same in every step of every process.

    torch sums the gradients of the first backward pass in one bucket, and those of later ones in buckets that follow
    the order in which gradients were ready. On three or more ranks, the order of a sum depends on its position in a
    bucket, so a resumed process would sum its first step in another order than a process that is in its second step.
    Here the buckets are formed before the first backward pass, from the last registered parameter to the first, about
    the order in which gradients are ready.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not self.find_unused_parameters:  # else torch forms them once, when it is constructed
            self.reducer._push_all_rebuilt_params()
            self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        if not self.find_unused_parameters:
            parameters.reverse()
            expect_sparse_gradient.reverse()
        return parameters, expect_sparse_gradient


def has_fixed_buckets(chunk: nn.Module) -> bool:
    """Whether a chunk sums gradients over ranks in the same order in every process; False for torch's own DDP."""
    is_plain = isinstance(chunk, DistributedDataParallel) and not isinstance(chunk, FixedBuckets)
    return not is_plain or bool(chunk.find_unused_parameters and not chunk.static_graph)


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
