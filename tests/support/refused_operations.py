"""Refuses on the CPU what torch refuses on CUDA in its strict deterministic mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

REFUSED = frozenset(
    {"nll_loss2d_forward", "nll_loss2d_backward", "put_", "histc", "median.dim", "grid_sampler_2d_backward"}
    | {"_ctc_loss_backward", "max_unpool2d", "_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward"}
    | {"upsample_bilinear2d_backward", "reflection_pad1d_backward", "_embedding_bag_dense_backward"}
)
"""Operations that the documentation of `torch.use_deterministic_algorithms` lists as errors on CUDA tensors."""


class RefusesAsCuda(TorchDispatchMode):
    """Raises torch's error at an operation that has no deterministic algorithm on CUDA."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.").removesuffix(".default")
        is_sum_of_floats = name.startswith("cumsum") and args[0].is_floating_point()
        has_weights = name.startswith("bincount") and len(args) > 1 and args[1] is not None
        if is_sum_of_floats or has_weights or name in REFUSED:
            raise RuntimeError(f"{name} does not have a deterministic implementation, but you set 'torch.use_...'")
        return func(*args, **(kwargs or {}))
