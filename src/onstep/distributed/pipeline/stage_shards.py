"""Sums the gradients of a stage that FSDP2 has in shards, once in a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from onstep.distributed.shards import parameter_groups, sharded_modules


class StageShards:
    """The shards of a stage, whose micro-batches are many passes to FSDP2, of which none is known to be the last.

    Gradients of whole weights add up over the passes of a step. A pass gathers weights as in any training: with
    `fsdp.reshard_after_forward` for each pass of a micro-batch, else once for all of them.

    Args:
        chunk: the stage; one without shards has nothing to do here.
    """

    def __init__(self, chunk: nn.Module) -> None:
        self._chunk: Any = chunk
        self._modules = sharded_modules(chunk)
        self._groups = [group for module in self._modules for group in parameter_groups(module)]
        self._keeps = not any(group.post_forward_mesh_info is not None for group in self._groups)
        self._whole: list[nn.Parameter] = []

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that passes compute with: of shards the gathered ones, which have weights only in passes."""
        if not self._modules:
            yield from self._whole or self._chunk.parameters()
            return
        for group in self._groups:
            yield from (one.unsharded_param for one in group.fsdp_params)

    def begin(self) -> None:
        """Let gradients add up in the passes that follow."""
        if not self._modules:
            self._whole = [*self._chunk.parameters()]  # torch asks for them in each pass
            return
        self._chunk.set_is_last_backward(False)
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(not self._keeps, recurse=False)

    def reduce(self) -> None:
        """Sum the gradients over the ranks, and free whole weights. Collective over the ranks of the shards."""
        if not self._modules:
            return
        self._chunk.set_is_last_backward(True)
        for module in self._modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)
        for group in reversed(self._groups):
            group.post_backward()
        self._chunk._get_fsdp_state()._root_post_backward_final_callback()  # as torch's own stages do
