"""Handles tensors that are sharded over ranks (DTensors of FSDP2 and tensor parallelism, sequences), per rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Split(NamedTuple):
    """How a tensor is sharded: the dimensions of its mesh over which ranks hold different parts of it."""

    mesh: DeviceMesh | None = None
    """None for a plain tensor, and for a DTensor of other ranks only."""
    dims: tuple[int, ...] = ()

    def groups(self) -> Iterator[tuple[ProcessGroup, bool]]:
        """The process groups of the dimensions of the mesh with other ranks, and whether these hold other parts."""
        if self.mesh is not None:
            for dim in range(self.mesh.ndim):
                if self.mesh.size(dim) > 1:
                    yield self.mesh.get_group(dim), dim in self.dims

    def plane(self) -> set[int]:
        """The ranks that hold the parts of this rank's copy of the tensor; this rank is one of them."""
        if self.mesh is None or (coordinate := self.mesh.get_coordinate()) is None:
            return {rank()}
        place = tuple(slice(None) if dim in self.dims else coordinate[dim] for dim in range(self.mesh.ndim))
        return set(self.mesh.mesh[place].flatten().tolist())


def as_dtensor(tensor: Tensor) -> DTensor | None:
    """`tensor` if it is a DTensor."""
    if type(tensor) in (Tensor, Parameter):  # importing DTensor costs 0.7 s, which only runs with subclasses pay
        return None
    from torch.distributed.tensor import DTensor

    return tensor if isinstance(tensor, DTensor) else None


def has_ranks_of(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    """Whether two meshes have the same ranks in the same order, perhaps along other dimensions.

    Args:
        mesh: any mesh.
        other: another one.
    """
    return torch.equal(mesh.mesh.flatten(), other.mesh.flatten())


def model_parameter(tensor: Tensor) -> Tensor:
    """The parameter of the model that an optimizer updates by `tensor`; this itself, unless it is a shard of one.

    Args:
        tensor: of an optimizer's groups.
    """
    known: Tensor | None = getattr(tensor, "model_parameter", None)
    return tensor if known is None else known


def updated_shard(parameter: Tensor) -> Tensor:
    """What an optimizer updates for a parameter of the model: a shard of it if ranks divide the updates, or itself.

    Args:
        parameter: of a model.
    """
    known: Tensor | None = getattr(parameter, "updated_shard", None)
    return parameter if known is None else known


def put_into_shards(modules: Iterable[nn.Module]) -> None:
    """Free the whole weights that FSDP2 leaves in modules, such as those of its root after an evaluation."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in modules:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def sharded_modules(chunk: nn.Module) -> list[FSDPModule]:
    """The modules of a chunk that FSDP2 gathers.

    Args:
        chunk: a model chunk.
    """
    if "torch.distributed.fsdp" not in sys.modules:
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in chunk.modules() if isinstance(module, FSDPModule)]


@contextmanager
def usable_shards(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Gather what chunks have outside of their blocks; afterwards all of them is in shards again. Collective.

    Whatever calls parts of a chunk needs it: only a call of the whole gathers these parameters by itself.

    Args:
        chunks: model chunks, in shards or not.
    """
    roots = {id(chunk) for chunk in chunks}
    sharded = list(dict.fromkeys(module for chunk in chunks for module in sharded_modules(chunk)))
    for module in sharded:
        if id(module) in roots:
            module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def parameter_groups(module: FSDPModule) -> list[Any]:
    """What FSDP2 gathers together for a module, in torch's private form.

    Args:
        module: one that `fully_shard` was given.
    """
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.13 has at most one
    return [one for one in ([state._fsdp_param_group] if groups is None else groups) if one is not None]


def is_in_shards(module: nn.Module) -> bool:
    """Whether parameters of a module are sharded; it then has its shards afterwards."""
    put_into_shards([module])
    return is_sharded(module.parameters())


def is_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether any of `tensors` is a DTensor, so that all ranks must take part in whatever needs its whole value."""
    return any(as_dtensor(tensor) is not None for tensor in tensors)


def split_of(tensor: Tensor) -> Split:
    """How `tensor` is sharded."""
    dtensor = as_dtensor(tensor)
    if dtensor is None or dtensor.device_mesh.get_coordinate() is None:
        return Split()
    placements = enumerate(dtensor.placements)
    dims = tuple(dim for dim, one in placements if not (one.is_replicate() or one.is_partial()))
    return Split(dtensor.device_mesh, dims)


def local_part(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """This rank's shard of `tensor`; an unsharded tensor is returned itself.

    Collective for a DTensor whose ranks hold summands (`Partial`), or that is sharded differently from `like`.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor
    from torch.distributed.tensor import Replicate

    other = None if like is None else as_dtensor(like)
    placements = dtensor.placements if other is None else other.placements
    placements = tuple(Replicate() if one.is_partial() else one for one in placements)
    if placements != dtensor.placements:
        dtensor = dtensor.redistribute(placements=placements)
    return dtensor.to_local()


def local_weight(weight: Tensor) -> Tensor:
    """What this rank holds of a weight, for a computation outside of its module; gradients flow back to the weight.

    Args:
        weight: a parameter, perhaps a whole one.
    """
    dtensor = as_dtensor(weight)
    return weight if dtensor is None else dtensor.to_local()


def with_local_value(like: Tensor, value: Tensor) -> Tensor:
    """A DTensor that is divided as another one.

    Args:
        like: a DTensor.
        value: what this rank holds of the new one.
    """
    from torch.distributed.tensor import DTensor

    known: Any = like
    return DTensor.from_local(
        value, known.device_mesh, known.placements, run_check=False, shape=known.shape, stride=known.stride()
    )


def held_part(tensor: Tensor) -> Tensor:
    """The memory of this rank that is its part of `tensor`, without communication; an unsharded tensor's is all of it.

    Args:
        tensor: a tensor on the device, of which the result is a view that autograd does not see.
    """
    dtensor = as_dtensor(tensor)
    if dtensor is None:
        return tensor.detach()
    with torch.no_grad():
        return dtensor.to_local()


def held_parts(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The memory of this rank that is its part of each tensor: `held_part` of many, at a twentieth of its cost.

    Args:
        tensors: DTensors and plain tensors; autograd does not see what is done with the results.
    """
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]  # to_local() makes a new Parameter


def held_like(tensors: Sequence[Tensor], models: Sequence[Tensor]) -> list[Tensor]:
    """`local_part(tensor, like=model)` of each; collective for those that are sharded differently from their model.

    Args:
        tensors: such as gradients.
        models: such as their parameters.
    """
    for tensor, model in zip(tensors, models, strict=True):
        if getattr(tensor, "placements", None) != getattr(model, "placements", None):
            return [local_part(one, like=model) for one, model in zip(tensors, models, strict=True)]
    return held_parts(tensors)


def whole(tensor: Tensor) -> Tensor:
    """The whole value of `tensor`. Collective for a DTensor."""
    dtensor = as_dtensor(tensor)
    return tensor if dtensor is None else dtensor.full_tensor()


def rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_sequence(part: Tensor, group: ProcessGroup | None) -> Tensor:
    """Gather the parts of all ranks of `group` along dimension 0, in rank order. Collective over the group.

    For a result from which every rank computes the same loss: the gradient of a rank's part is its own slice of the
    incoming gradient, not a sum over ranks.

    Args:
        part: (seq / ranks, ...), with the same shape on every rank.
        group: with None, or a single rank, `part` itself is returned.
    """
    if group is None or dist.get_world_size(group) == 1:
        return part
    gathered: Tensor = _GatherSequence.apply(part, group)  # type: ignore[no-untyped-call]
    return gathered


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: ProcessGroup) -> Tensor:
        ctx.length, ctx.rank = part.shape[0], dist.get_rank(group)
        whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        start = ctx.rank * ctx.length
        return gradient[start : start + ctx.length], None
