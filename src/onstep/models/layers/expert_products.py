"""Multiplies the rows of each expert by its weights: grouped, in blocks, padded, or one expert after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, linear

ExpertProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""`x W_e^T + b_e` for rows `x` ordered by expert; weights are (experts, out, in), biases (experts, out)."""

Way = Literal["grouped", "blocks", "loop"]

_ALIGNMENT_BYTES = 16
"""Row alignment that the grouped matrix product requires, in bytes."""

_GROUPED_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}

_BLOCKS_PER_EXPERT = 2
_LEAST_BLOCK_ROWS = 16
_BLOCKS_MAX_PRODUCTS = 2**30
"""Multiplications of one product up to which blocks cost less than a wait: they pad by up to a half."""
_BLOCKS_MAX_WEIGHTS = 2**24
"""Weights that blocks may copy for one product."""


def way_to_multiply(device: torch.device, dtype: torch.dtype, num_rows: int, num_experts: int, *widths: int) -> Way:
    """How to multiply rows of two widths whose loads are on the device.

    The grouped product and blocks do not need the loads on the host; the loop waits for them, which costs an
    accelerator less than blocks if the products are large.
    """
    if can_group(device, dtype, *widths):
        return "grouped"
    num_products = num_rows * widths[0] * widths[1]
    num_weights = (_BLOCKS_PER_EXPERT + 1) * num_experts * widths[0] * widths[1]
    is_small = num_products <= _BLOCKS_MAX_PRODUCTS and num_weights <= _BLOCKS_MAX_WEIGHTS
    return "blocks" if is_small and device.type != "cpu" else "loop"


def can_group(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether torch supports the grouped product for a device, a dtype and rows of these widths.

    On a GPU this requires bfloat16 and compute capability 8.0 or higher.
    """
    if dtype not in _GROUPED_DTYPES.get(device.type, ()):
        return False
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return all(width * dtype.itemsize % _ALIGNMENT_BYTES == 0 for width in widths)


class GroupedProduct:
    """All experts in one grouped product; the host does not need to know their loads.

    Args:
        load: (experts,), the number of rows of each expert.
    """

    def __init__(self, load: Tensor) -> None:
        self._load = load
        self._ends = load.cumsum(0).to(torch.int32)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (rows, in) to (rows, out)."""
        if torch.compiler.is_compiling() and x.dtype is not torch.bfloat16:  # the only type that torch compiles it for
            out: Tensor = _opaque_product(x, weight, self._ends)
        else:
            out = grouped_mm(x, weight.transpose(1, 2), offs=self._ends)
        if bias is not None:
            out = out + bias.repeat_interleave(self._load, dim=0, output_size=x.shape[0])
        return out


class LoopedProduct:
    """One product per expert; the host waits for the loads."""

    def __init__(self, load: Tensor) -> None:
        self._rows: list[int] = load.tolist()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Rows (rows, in) to (rows, out). Experts without rows are multiplied too, which gives them a zero gradient."""
        biases = [None] * len(self._rows) if bias is None else bias.unbind()
        parts = zip(torch.split(x, self._rows), weight.unbind(), biases, strict=True)
        return torch.cat([linear(*part) for part in parts])


class Blocks:
    """Blocks of equally many rows, each of one expert, so that no size depends on the loads.

    An expert has as many blocks as it needs, the last of which is padded; blocks that none needs are the last expert's.

    Args:
        load: (experts,), the number of rows of each expert.
        num_rows: their sum.
    """

    def __init__(self, load: Tensor, num_rows: int) -> None:
        num_experts = load.shape[0]
        self.num_block_rows = max(_LEAST_BLOCK_ROWS, -(-num_rows // (_BLOCKS_PER_EXPERT * num_experts)))
        self.num_blocks = num_rows // self.num_block_rows + num_experts
        """At least as many as the experts need together, whatever the loads."""
        needed = (load + self.num_block_rows - 1) // self.num_block_rows
        ends = needed.cumsum(0)
        self.first = ends - needed
        """(experts,), the first block of each."""
        numbers = torch.arange(self.num_blocks, device=load.device)
        self.experts = torch.searchsorted(ends, numbers, right=True).clamp(max=num_experts - 1)
        """(blocks,), the expert of each."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(blocks, rows, in) to (blocks, rows, out)."""
        out = torch.bmm(x, weight[self.experts].transpose(1, 2))
        return out if bias is None else out + bias[self.experts].unsqueeze(1)


def padded_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(experts, capacity, in) to (experts, capacity, out): equally many rows each, so no size depends on the loads."""
    out = torch.bmm(x, weight.transpose(1, 2))
    return out if bias is None else out + bias.unsqueeze(1)


# The grouped product as an operator that compilers do not look into. Drop these once torch compiles `grouped_mm` for
# the types that it computes.


@torch.library.custom_op("onstep::grouped_product", mutates_args=())
def _opaque_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(x, weight.transpose(1, 2), offs=ends)


@_opaque_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("onstep::grouped_weight_gradient", mutates_args=())
def _opaque_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(grad.transpose(0, 1), x, offs=ends)


@_opaque_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _keep_for_backward(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(context: torch.autograd.function.BackwardCFunction, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    saved: tuple[Tensor, ...] = context.saved_tensors
    x, weight, ends = saved
    grad = grad.contiguous()
    return _opaque_product(grad, weight.transpose(1, 2), ends), _opaque_weight_gradient(grad, x, ends), None


_opaque_product.register_autograd(_backward, setup_context=_keep_for_backward)
