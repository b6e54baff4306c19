"""Computes norms of parameters and gradients with foreach calls, in float64, with a single device synchronization.

The shards that a rank holds of sharded tensors (FSDP2, tensor parallelism) are combined into norms of the full tensors
in a single reduction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from onstep.distributed.pipeline.whole import WholePipeline, pipeline_of
from onstep.distributed.shard_sums import ShardSums
from onstep.distributed.shards import Split, is_sharded, local_part, split_of, updated_shard
from onstep.metrics.norms.named_parameters import Model, chunks_of, measurable_parameters, named_parameters, reshard

_NONE = -1.0
"""In place of the norm of a tensor that a rank does not have, such as a gradient."""
_PIECE = 2**16
"""Elements converted to float64 at a time on a CPU, so that the copy fits in cache; GPUs convert while reading."""


@dataclass(frozen=True)
class LocalNorms:
    """Norms of this rank's shards of some tensors, still on the device."""

    names: tuple[str, ...]
    values: Tensor
    """One norm per name, (num_names,) float64."""
    order: float = 2.0
    """2 for the L2 norm, infinity for the largest absolute value."""

    @classmethod
    def none(cls, order: float = 2.0) -> LocalNorms:
        """The norms of no tensors."""
        return cls((), torch.zeros(0, dtype=torch.float64), order)


def parameter_norms(model: Model) -> dict[str, float]:
    """The L2 norm of every parameter by name, tied ones once, in module order.

    Equivalent to a computation in float64, whatever the precision and magnitude of the parameters. Parameters without
    values (`missing_parameters`) are omitted.

    Collective if parameters are DTensors, or if the model is in stages of a pipeline (`are_over_ranks`); the norms are
    those of the full tensors, of all stages. Synchronizes with the device once.

    Args:
        model: a module, or a list of chunks, whose names are merged.
    """
    return full_norms(local_parameter_norms(model), model)


def gradient_norms(model: Model) -> dict[str, float]:
    """The L2 norm of every gradient by its parameter's name; parameters without a gradient are omitted.

    The gradient is `main_grad` if a parameter has it, else `grad`. Otherwise like `parameter_norms`.
    """
    return full_norms(local_gradient_norms(model), model)


def total_norm(norms: Mapping[str, float]) -> float:
    """The L2 norm of all tensors together, from their individual norms; 0 if there are none."""
    return math.hypot(*norms.values())


def report_l2_norm_grad(model: Model) -> dict[str, float]:
    """The L2 norm of each gradient as ``l2_norm/grad/<name>``, and of all of them as ``l2_norm/grad/global``.

    With several chunks, the global norm covers all chunks, each gradient counted once. Sharded gradients and
    synchronization are handled as in `gradient_norms`.

    Args:
        model: a module or a list of model chunks.
    """
    norms = gradient_norms(model)
    report = {f"l2_norm/grad/{name}": norm for name, norm in norms.items()}
    report["l2_norm/grad/global"] = total_norm(norms)
    return report


def local_parameter_norms(model: Model) -> LocalNorms:
    """The norms of this rank's shards of the parameters, without synchronizing with the device."""
    reshard(model)
    with torch.no_grad():
        parts = {name: local_part(one) for name, one in measurable_parameters(model).items()}
    return local_norms(parts)


def local_gradient_norms(model: Model) -> LocalNorms:
    """The L2 norms of this rank's shards of the gradients, without synchronizing with the device.

    Collective only for gradients that are sharded differently from their parameters.
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
    """The norm of each tensor, in float64, on the device of the first tensor."""
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


def full_norms(local: LocalNorms, model: Model, *, are_of_gradients: bool = False) -> dict[str, float]:
    """The norms of full tensors by name, from the shards of each rank. Synchronizes with the device once.

    Collective if `are_over_ranks`, also for a rank without norms: the norms are those of all stages of a pipeline.
    Tensors that no rank has are omitted.

    Args:
        local: norms of tensors that are sharded like the parameters of these names.
        model: the model.
        are_of_gradients: whether they are norms of gradients, which may be in shards where parameters are whole.
    """
    return of_all_stages(_norms_here(local, model, are_of_gradients=are_of_gradients), model)


def of_all_stages(norms: dict[str, float], model: Model) -> dict[str, float]:
    """The norms of a whole model. Collective if this rank has stages of a pipeline, otherwise `norms`.

    Args:
        norms: of this rank's parameters by name.
        model: the model.
    """
    pipeline = _pipeline_of(model)
    return norms if pipeline is None else pipeline.merged(norms)


def are_over_ranks(model: Model) -> bool:
    """Whether the norms of full tensors are collective: parameters are DTensors, or the model is in stages.

    Args:
        model: a module, or a list of chunks.
    """
    return _pipeline_of(model) is not None or is_sharded(named_parameters(model).values())


def _pipeline_of(model: Model) -> WholePipeline | None:
    return next(map(pipeline_of, chunks_of(model)), None)


def _norms_here(local: LocalNorms, model: Model, *, are_of_gradients: bool) -> dict[str, float]:
    """The norms of this rank's full tensors."""
    known = named_parameters(model)
    if are_of_gradients:
        known = {name: updated_shard(one) for name, one in known.items()}
    if not local.names and not is_sharded(known.values()):
        return {}
    reshard(model)
    parameters = measurable_parameters(model)
    if are_of_gradients:
        parameters = {name: updated_shard(one) for name, one in parameters.items()}
    names = [*parameters, *(name for name in local.names if name not in parameters)]
    sums = ShardSums([split_of(parameters[name]) if name in parameters else Split() for name in names])
    if not sums.has_others:
        return dict(zip(local.names, local.values.tolist(), strict=True))
    places = {name: place for place, name in enumerate(names)}
    values = local.values.new_full((len(names),), _NONE)
    values[[places[name] for name in local.names]] = local.values
    whole = sums(values, partial(_combined, order=local.order)).tolist()
    return {name: norm for name, norm in zip(names, whole, strict=True) if norm != _NONE}


def _combined(norms: Tensor, order: float) -> Tensor:
    """The norms of tensors from those of their shards, (num_ranks, n) float64, without intermediate overflow."""
    largest: Tensor = norms.amax(0)
    if order == math.inf:
        return largest
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    combined = (norms.clamp(min=0) / scale).square().sum(0).sqrt() * scale
    return combined.where(largest != _NONE, largest)


def _numbers(tensor: Tensor) -> Tensor:
    """The values of `tensor` as a dense tensor; for a sparse one, its stored values."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _norms_alike(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Norms of tensors of one device and dtype, scaled, since squares of float64 values can leave its range."""
    if tensors[0].dtype == torch.float64:
        return [_scaled_norm(tensor, order) for tensor in tensors]
    return _norms_in_pieces(tensors, order) if tensors[0].device.type == "cpu" else _norms_of_non_empty(tensors, order)


def _norms_of_non_empty(tensors: list[Tensor], order: float) -> list[Tensor]:
    """Like `_norms_alike`, for non-empty tensors: torch has no maximum of an empty shard of a small tensor."""
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
