"""Represents, on each rank of a pipeline, the tensors of other stages: by DTensors of no rank that is here.

They have shape and type, and no values: a checkpoint neither writes nor reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onstep.distributed.world import World
from onstep.errors import CheckpointError


class _Elsewhere(NamedTuple):
    """A tensor of another stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def of_all_stages(own: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What all stages have by name of a parameter, with stand-ins for the tensors of others. Collective.

    Args:
        own: of this rank's stages: tensors, or mappings with tensors.
        world: the ranks of the run.
    """
    state: dict[str, Any] = {}
    for values in items_of_stages(_outline(own), world):
        for name, value in values.items():
            state[name] = own[name] if name in own else _present(value, world)
    return state


def destinations_here(found: Mapping[str, Any], outline: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Where each part of a stored state goes: this rank's parts to `found`, those of other stages nowhere.

    Args:
        found: the destinations of what is of this rank, by name.
        outline: the stored state by name, with tensors on the meta device.
        world: the ranks of the run.
    """
    return {name: found[name] if name in found else _absent(value, world) for name, value in outline.items()}


def items_of_stages(own: Any, world: World) -> list[Any]:
    """The item of each rank of the pipeline. Collective.

    Args:
        own: a small picklable object of this rank.
        world: the ranks of the run.
    """
    everywhere = world.gather(own)
    return [everywhere[rank] for rank in world.part("pp")]


def _outline(value: Any) -> Any:
    """The same with what is known of each tensor in its place."""
    if isinstance(value, Tensor):
        return _Elsewhere(tuple(value.shape), value.dtype)
    if isinstance(value, Mapping):
        return {key: _outline(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        raise CheckpointError("the optimizer has lists in its state, whose tensors a pipeline cannot name; use adamw.")
    return value


def _present(value: Any, world: World) -> Any:
    """An outline with stand-ins in place of what is known of tensors."""
    if isinstance(value, _Elsewhere):
        return stand_in(*value, world)
    return {key: _present(item, world) for key, item in value.items()} if isinstance(value, Mapping) else value


def _absent(value: Any, world: World) -> Any:
    """A stored state with stand-ins in place of its meta tensors."""
    if isinstance(value, Tensor):
        return stand_in(tuple(value.shape), value.dtype, world) if value.is_meta else value
    return {key: _absent(item, world) for key, item in value.items()} if isinstance(value, Mapping) else value


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, world: World) -> Tensor:
    """A DTensor that another rank has.

    Args:
        shape: of the whole tensor.
        dtype: its type.
        world: the ranks of the run.
    """
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return _on_rank((world.rank + 1) % world.size, meta, torch.empty(0, dtype=dtype))


def only_here(tensor: Tensor, world: World) -> Tensor:
    """The same memory as a DTensor that this rank alone has.

    Args:
        tensor: a whole tensor.
        world: the ranks of the run.
    """
    return _on_rank(world.rank, tensor, tensor.detach())


def _on_rank(rank: int, whole: Tensor, held: Tensor) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate  # importing DTensor costs 0.7 s
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = DeviceMesh("cpu", [rank], _init_backend=False)
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    return DTensor(held, spec, requires_grad=False)  # type: ignore[no-untyped-call]
