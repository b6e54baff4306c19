"""Norms of parameters and gradients: by foreach calls, accumulated in float64, with one read of the device.

The parts that a rank holds of sharded tensors (FSDP2, tensor parallelism) are combined into the norms of the whole
tensors, all of them in one reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.distributed.shards import Split, local_part, split_of
from onstep.metrics.norms.named_parameters import Model, measurable_parameters, reshard

_PIECE = 2**16
"""Elements that a CPU widens to float64 at once, in a copy that its cache holds; GPUs widen as they read."""


@dataclass(frozen=True)
class LocalNorms:
    """Norms of this rank's parts of some tensors, still on the device."""

    names: tuple[str, ...]
    values: Tensor
    """One for each name, (num_names,) float64."""
    order: float = 2.0
    """2 for the L2 norm, infinity for the largest absolute value."""

    @classmethod
    def none(cls, order: float = 2.0) -> LocalNorms:
        """The norms of no tensors."""
        return cls((), torch.zeros(0, dtype=torch.float64), order)


def parameter_norms(model: Model) -> dict[str, float]:
    """The L2 norm of every parameter by name, a tied one once, in the order of the modules.

    Equals a computation in float64, whatever the precision of the parameters and however large or small their values.
    Parameters without values (`missing_parameters`) are left out.

    Collective where parameters are DTensors; the norms are those of the whole tensors. Reads the device once.

    Args:
        model: a module, or a list of chunks, whose names are merged.
    """
    return full_norms(local_parameter_norms(model), model)


def gradient_norms(model: Model) -> dict[str, float]:
    """The L2 norm of every gradient by its parameter's name; parameters without a gradient are left out.

    The gradient is `main_grad` where a parameter has it, else `grad`. Otherwise as `parameter_norms`.
    """
    return full_norms(local_gradient_norms(model), model)


def total_norm(norms: Mapping[str, float]) -> float:
    """The L2 norm of all tensors together, from the norm of each; 0 without any."""
    return math.hypot(*norms.values())


def report_l2_norm_grad(model: Model) -> dict[str, float]:
    """The L2 norm of each gradient as ``l2_norm/grad/<name>``, and of all of them as ``l2_norm/grad/global``.

    With several chunks the global norm is that over all chunks, each gradient counted once. Sharded gradients and reads
    of the device are as in `gradient_norms`.

    Args:
        model: a module or a list of model chunks.
    """
    norms = gradient_norms(model)
    report = {f"l2_norm/grad/{name}": norm for name, norm in norms.items()}
    report["l2_norm/grad/global"] = total_norm(norms)
    return report


def local_parameter_norms(model: Model, order: float = 2.0) -> LocalNorms:
    """The norms of this rank's parts of the parameters, without waiting for the device."""
    reshard(model)
    with torch.no_grad():
        parts = {name: local_part(one) for name, one in measurable_parameters(model).items()}
    return local_norms(parts, order)


def local_gradient_norms(model: Model) -> LocalNorms:
    """The L2 norms of this rank's parts of the gradients, without waiting for the device.

    Collective only for gradients that are not split as their parameters are.
    """
    reshard(model)
    parameters = measurable_parameters(model)
    gradients = {name: (gradient_of(one), one) for name, one in parameters.items()}
    with torch.no_grad():
        parts = {name: local_part(grad, like=one) for name, (grad, one) in gradients.items() if grad is not None}
    return local_norms(parts)


def gradient_of(parameter: Tensor) -> Tensor | None:
    """The gradient that the optimizer uses: `main_grad`, which some wrappers accumulate in float32, else `grad`."""
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


def local_norms(tensors: Mapping[str, Tensor], order: float = 2.0) -> LocalNorms:
    """The norm of each tensor, in float64, on the device of the first."""
    groups: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        numbers = _numbers(tensor)
        groups.setdefault((numbers.device, numbers.dtype), {})[name] = numbers
    norms: dict[str, Tensor] = {}
    with torch.no_grad():
        for members in groups.values():
            norms |= zip(members, _norms_alike(list(members.values()), order), strict=True)
        values = [norms[name] for name in tensors]
        if not values:
            return LocalNorms.none(order)
        home = values[0].device
        return LocalNorms(tuple(tensors), torch.stack([value.to(home) for value in values]), order)


def full_norms(local: LocalNorms, model: Model) -> dict[str, float]:
    """The norms of whole tensors by name, from what each rank has of them. Reads the device once.

    Collective where parameters of `model` are DTensors.

    Args:
        local: norms of tensors that are split as the parameters of these names are.
    """
    if not local.names:
        return {}
    reshard(model)
    values, parameters = local.values, measurable_parameters(model)
    by_split: dict[Split, list[int]] = {}
    for place, name in enumerate(local.names):
        if name in parameters:
            by_split.setdefault(split_of(parameters[name]), []).append(place)
    for split, places in by_split.items():
        if not split:
            continue
        index = torch.tensor(places, device=values.device)
        part = values[index]
        for mesh, dim in split:
            part = _combined(part, local.order, mesh.get_group(dim))
        values = values.index_copy(0, index, part)
    return dict(zip(local.names, values.tolist(), strict=True))


def _combined(norms: Tensor, order: float, group: Any) -> Tensor:
    """The norms of tensors of which each rank of `group` has a part, (n,) float64; nothing overflows in between."""
    largest = norms.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may lose a NaN
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    if order == math.inf:
        return largest
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    squares = (norms / scale).square()
    dist.all_reduce(squares, op=dist.ReduceOp.SUM, group=group)
    return squares.sqrt() * scale


def _numbers(tensor: Tensor) -> Tensor:
    """The values of `tensor` in a form that norms can be taken of: of a sparse one, those that it has."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _norms_alike(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Norms of tensors of one device and type. Squares of float64 may leave the range of float64."""
    if tensors[0].dtype == torch.float64:
        return [_scaled_norm(tensor, order) for tensor in tensors]
    return _norms_in_pieces(tensors, order) if tensors[0].device.type == "cpu" else _norms_of_non_empty(tensors, order)


def _norms_of_non_empty(tensors: list[Tensor], order: float) -> list[Tensor]:
    """A rank's part of a small tensor may be empty, of which torch knows no largest value."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    norms = iter(torch._foreach_norm(filled, order, torch.float64) if filled else ())
    return [next(norms) if tensor.numel() else tensor.new_zeros((), dtype=torch.float64) for tensor in tensors]


def _norms_in_pieces(tensors: list[Tensor], order: float) -> list[Tensor]:
    pieces = [_pieces(tensor) for tensor in tensors]
    norms = iter(_norms_of_non_empty([piece for of_one in pieces for piece in of_one], order))
    of_each = [[next(norms) for _ in of_one] for of_one in pieces]
    return [one[0] if len(one) == 1 else torch.linalg.vector_norm(torch.stack(one), order) for one in of_each]


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.numel() <= _PIECE:
        return (tensor,)
    rows = max(1, _PIECE * tensor.shape[0] // tensor.numel())
    return torch.split(tensor, rows)


def _scaled_norm(tensor: Tensor, order: float) -> Tensor:
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float64)
    largest = tensor.abs().amax()
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    norm: Tensor = torch.linalg.vector_norm(tensor / scale, order)
    return norm * scale
