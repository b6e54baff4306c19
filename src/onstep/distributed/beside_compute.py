"""Lets the collectives of FSDP2 run beside the computation on a CPU, which has no streams that would do so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from onstep.distributed.shards import parameter_groups


def gather_beside(modules: Sequence[FSDPModule]) -> None:
    """Let a module that gathers weights ahead of their use continue at once; who uses them waits.

    Args:
        modules: those that `fully_shard` was given.
    """
    for module in modules:
        module._set_unshard_async_op(True)  # torch's only way, which it does not promise to keep


def scatter_beside(modules: Sequence[FSDPModule]) -> None:
    """Let a backward pass continue while gradients are scattered, and end when all of them are.

    For gradients that are only stored when they arrive: neither converted, nor divided, nor summed over replicas.

    Args:
        modules: those that `fully_shard` was given.
    """
    under_way = _UnderWay()
    for module in modules:
        for group in parameter_groups(module):
            module.set_custom_reduce_scatter(_Scatter(group, under_way))


class _UnderWay:
    """The last scatter, which is awaited before the next one and at the end of the backward pass."""

    def __init__(self) -> None:
        self._work: dist.Work | None = None

    def replace(self, work: dist.Work) -> None:
        """Wait for the last one; the backward pass that is running waits for this one."""
        self.finish()
        self._work = work
        Variable._execution_engine.queue_callback(self.finish)

    def finish(self) -> None:
        """Wait for the last one."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()


class _Scatter(DefaultReduceScatter):
    """torch's scatter, but for the wait; it waits too where the result is read at once."""

    def __init__(self, group: Any, under_way: _UnderWay) -> None:
        self._group, self._under_way = group, under_way

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> dist.Work:
        params = [one.sharded_param for one in self._group.fsdp_params]
        is_read = any(one.grad is not None or one._post_accumulate_grad_hooks for one in params)
        if async_op or is_read or getattr(self._group, "_all_reduce_hook", None) is not None:
            return super().__call__(output_tensor, input_tensor, group, op, async_op)
        work = super().__call__(output_tensor, input_tensor, group, op, async_op=True)
        self._under_way.replace(work)
        return work
