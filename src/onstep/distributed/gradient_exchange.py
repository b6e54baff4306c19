"""Averages the gradients of a bucket over the ranks in the type asked for, and notes those of this rank before."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from onstep.config import DistributedDataParallelConfig
from onstep.distributed.block_norms import norms_of
from onstep.errors import ConfigError

BucketHook = Callable[[Any], torch.futures.Future[Tensor]]
"""Called with a `torch.distributed.GradBucket`, which type checkers do not find."""
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class Noted(NamedTuple):
    """Some parameters, and what was noted of their gradients: one number each, on the device."""

    parameters: list[Tensor]
    largest: Tensor | None
    """The largest absolute value; NaN or infinite if any value is."""
    norms: Tensor | None
    """The L2 norm."""


class LocalGradients:
    """What this rank's gradients were before the ranks exchanged them, by parameter; nothing waits for the device.

    Args:
        largest: whether to note the largest absolute values.
        norms: whether to note the norms.
    """

    def __init__(self, *, largest: bool, norms: bool) -> None:
        self._notes_largest, self._notes_norms = largest, norms
        self._noted: dict[int, Noted] = {}
        """By the first parameter, so that a later pass replaces what was not read."""

    def add(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Note the gradients of some parameters.

        Args:
            parameters: the parameters.
            gradients: the gradient of each.
        """
        alike: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = {}
        for parameter, gradient in zip(parameters, gradients, strict=True):
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if values.numel():
                alike.setdefault((values.dtype, values.device), []).append((parameter, values.detach()))
        for (dtype, _), pairs in alike.items():
            grads, wide = [grad for _, grad in pairs], torch.float32 if dtype in _LOW_PRECISION else None
            largest = torch.stack(torch._foreach_norm(grads, float("inf"))) if self._notes_largest else None
            norms = torch.stack(norms_of(grads, wide)) if self._notes_norms else None
            self._noted[id(pairs[0][0])] = Noted([one for one, _ in pairs], largest, norms)

    def take(self) -> list[Noted]:
        """What was noted since the last call."""
        noted, self._noted = self._noted, {}
        return list(noted.values())


def notes_of(config: DistributedDataParallelConfig) -> LocalGradients | None:
    """What the checks of a configuration look at; None without any.

    Args:
        config: the section `ddp`.
    """
    if not (config.check_for_nan_in_grad or config.check_for_large_grads):
        return None
    return LocalGradients(largest=config.check_for_nan_in_grad, norms=config.check_for_large_grads)


def hook_of(
    config: DistributedDataParallelConfig,
    chunk: nn.Module,
    size: int,
    notes: LocalGradients | None,
    group: ProcessGroup | None = None,
) -> BucketHook | None:
    """The communication hook that a configuration asks for; None where torch's own exchange does the same.

    Args:
        config: the section `ddp`.
        chunk: the model chunk.
        size: the number of ranks whose gradients are averaged.
        notes: where to note this rank's gradients; None notes nothing.
        group: these ranks; None for all.
    """
    if not _asked(config, chunk):
        return None
    sums_low_in_float32 = _sums_low_in_float32(config, chunk)

    def averaged(bucket: Any) -> torch.futures.Future[Tensor]:
        if notes is not None:
            notes.add(bucket.parameters(), bucket.gradients())
        if config.grad_reduce_in_bf16:
            return average_in(torch.bfloat16, bucket.buffer(), size, group)
        is_low = bucket.buffer().dtype in _LOW_PRECISION
        return average_in(torch.float32 if sums_low_in_float32 and is_low else None, bucket.buffer(), size, group)

    return averaged


def _sums_low_in_float32(config: DistributedDataParallelConfig, chunk: nn.Module) -> bool:
    return config.grad_reduce_in_fp32 and any(
        one.dtype in _LOW_PRECISION for one in chunk.parameters() if one.requires_grad
    )


def _asked(config: DistributedDataParallelConfig, chunk: nn.Module) -> list[str]:
    """The keys that ask for a communication hook."""
    asks = {
        "grad_reduce_in_bf16": config.grad_reduce_in_bf16,
        "grad_reduce_in_fp32": _sums_low_in_float32(config, chunk),
        "check_for_nan_in_grad": config.check_for_nan_in_grad,
        "check_for_large_grads": config.check_for_large_grads,
    }
    return [name for name, is_asked in asks.items() if is_asked]


def average_in(
    dtype: torch.dtype | None, buffer: Tensor, size: int, group: ProcessGroup | None = None
) -> torch.futures.Future[Tensor]:
    """The average over the ranks of a buffer, in place, summed in another type; over any backend.

    With None the result has the bits of torch's own exchange. torch's hook `bf16_compress_hook` requires NCCL.

    Args:
        dtype: the type of what is sent and summed; None is that of the buffer.
        buffer: gradients of this rank.
        size: the number of ranks.
        group: these ranks; None for all.
    """
    sent = buffer if dtype is None else buffer.to(dtype)
    sent = sent.div_(size) if dtype is torch.bfloat16 else sent.mul_(1.0 / size)
    work = dist.all_reduce(sent, group=group, async_op=True)
    assert work is not None
    reduced: torch.futures.Future[list[Tensor]] = work.get_future()
    return reduced.then(lambda done: done.value()[0] if dtype is None else buffer.copy_(done.value()[0]))


def check_exchange(config: DistributedDataParallelConfig, chunk: nn.Module) -> None:
    """Refuse (ConfigError) sparse gradients, which have no buckets that a hook could read, if one is asked for.

    Args:
        config: the section `ddp`.
        chunk: the model chunk.
    """
    asked = _asked(config, chunk)
    if not asked:
        return
    for name, module in chunk.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigError(
                f"ddp.{asked[0]}=true reads or converts the gradients that ranks exchange, but {name or 'the model'} "
                f"is an embedding whose gradients are sparse; make it with sparse=False, or set the key to false."
            )
