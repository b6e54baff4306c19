"""A distributed optimizer (ZeRO-1) as a user of torch writes it: flat slices, hooks, asynchronous collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class _Bucket:
    def __init__(self, params: list[nn.Parameter], rank: int, world: int) -> None:
        size = sum(one.numel() for one in params)
        part = -(-size // world)
        self.param, self.grad = torch.zeros(part * world), torch.zeros(part * world)
        start = 0
        for one in params:
            end = start + one.numel()
            self.param[start:end].copy_(one.detach().flatten())
            one.data, one.grad = self.param[start:end].view_as(one), self.grad[start:end].view_as(one)
            start = end
        self.params, self.left = params, len(params)
        self.mine = slice(rank * part, (rank + 1) * part)
        self.master, self.shard = nn.Parameter(self.param[self.mine]), torch.zeros(part)
        self.summing: Any = None
        self.gathering: Any = None

    def begin_sum(self) -> None:
        self.summing = dist.reduce_scatter_single(self.shard, self.grad, async_op=True)

    def begin_gather(self) -> None:
        self.gathering = dist.all_gather_single(self.param, self.param[self.mine].clone(), async_op=True)

    def finish_gather(self) -> None:
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None


class DividedByHand:
    """A model whose gradients are averaged in slices, each of which one rank updates by AdamW.

    Args:
        model: a whole model.
        bucket: elements of a bucket.
        lr: the learning rate.
        sums: whether sums of gradients overlap with the backward pass.
        gathers: whether gathers of parameters overlap with the forward pass.
    """

    def __init__(self, model: nn.Module, bucket: int, lr: float, *, sums: bool, gathers: bool) -> None:
        self.model, self.world = model, dist.get_world_size()
        self._sums, self._gathers, self._is_last = sums, gathers, True
        self._buckets: list[_Bucket] = []
        part: list[nn.Parameter] = []
        params = list(model.parameters())[::-1]
        for one in params:
            part.append(one)
            if sum(each.numel() for each in part) >= bucket or one is params[-1]:
                self._buckets.append(_Bucket(part, dist.get_rank(), self.world))
                part = []
        of = {id(one): bucket for bucket in self._buckets for one in bucket.params}
        for one in params:
            one.register_post_accumulate_grad_hook(self._arrival(of[id(one)]))  # type: ignore[no-untyped-call]
        if gathers:
            for module in model.modules():
                if own := {id(b): b for one in module.parameters(recurse=False) if (b := of[id(one)])}:
                    module.register_forward_pre_hook(
                        lambda module, inputs, own=own: [each.finish_gather() for each in own.values()] and None
                    )
        self._inner = torch.optim.AdamW([bucket.master for bucket in self._buckets], lr=lr, fused=True)

    def _arrival(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            bucket.left -= 1
            if bucket.left == 0:
                bucket.left = len(bucket.params)
                if self._is_last and self._sums:
                    bucket.begin_sum()

        return arrived

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return self.model(*inputs, **named)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context keep their gradients local."""
        self._is_last = False
        yield
        self._is_last = True

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for bucket in self._buckets:
            bucket.grad.zero_()

    def step(self, clip: float) -> None:
        """Clip, update the slices, and gather."""
        if not self._sums:
            for bucket in self._buckets:
                bucket.begin_sum()
        for bucket in self._buckets:
            bucket.summing.wait()
            bucket.finish_gather()
            bucket.shard.div_(self.world)
            bucket.master.grad = bucket.shard
        squares = torch.stack(torch._foreach_norm([bucket.shard for bucket in self._buckets])).square().sum()
        dist.all_reduce(squares)
        factor = torch.clamp(clip / (squares.sqrt() + 1e-6), max=1.0)
        torch._foreach_mul_([bucket.shard for bucket in self._buckets], factor)
        self._inner.step()
        for bucket in self._buckets[::-1]:
            bucket.begin_gather()
        if not self._gathers:
            self.finish()

    def finish(self) -> None:
        """Wait for the gathers of the last update."""
        for bucket in self._buckets:
            bucket.finish_gather()
