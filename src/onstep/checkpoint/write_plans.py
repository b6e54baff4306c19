"""Divides states in shards among the ranks that write them, by the planner of torch.distributed.checkpoint.

A part that several ranks hold is written by one of them, so that all write about as many bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.checkpoint.format.stored_tensors import STEP_KEY
from onstep.checkpoint.saving import CollectedStates, SaveRequest, in_file_order
from onstep.distributed import World
from onstep.distributed.boxes import Box, box_of
from onstep.distributed.outcomes import together
from onstep.distributed.shards import as_dtensor, held_part
from onstep.errors import CheckpointError, UnsupportedStateError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan


@dataclass(frozen=True)
class _Share:
    """What a rank writes of a component."""

    form: tuple[Any, ...]
    """The form of the state for which this was found."""
    boxes: Mapping[str, Box]
    """The parts that it writes, by the names of their tensors."""
    layout: list[dict[str, Any]]
    """How the tensors lie on their meshes, for a manifest."""


class WritePlans:
    """Which rank writes what of the components in shards; found once, as long as they stay alike.

    Args:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, _Share] = {}

    def add_shares(self, taken: CollectedStates, request: SaveRequest, doing: str) -> SaveRequest:
        """Add this rank's share of each component in shards to what it writes; the request, with their layouts.

        Collective.

        Args:
            taken: the collected states of this rank.
            request: the save.
            doing: what is done, for errors.

        Raises:
            CheckpointError: on all ranks, for a state whose ranks hold something else than parts of the same tensors.
        """
        components = []
        for component in request.components:
            if component.sharing_pattern is SharingPattern.SHARDED:
                component = self._with_share(component, taken, request.step, doing)
            components.append(component)
        return replace(request, components=components)

    def _with_share(self, component: StateComponent, taken: CollectedStates, step: int, doing: str) -> StateComponent:
        state = taken.shards.get(component.key)
        share = self._share(component.key, None if state is None else state.tensors, doing)
        if state is None or share is None:
            return component
        own = {name: state.tensors[name] for name in share.boxes}
        taken.encoded.append(
            replace(
                state,
                tensors=in_file_order({name: held_part(tensor) for name, tensor in own.items()}),
                document=state.document if self._world.is_main else None,
                metadata={STEP_KEY: str(step)},
                offsets={name: box.offsets for name, box in share.boxes.items()},
                full_shapes={name: tuple(tensor.shape) for name, tensor in own.items()},
            )
        )
        return (
            replace(component, metadata={**component.metadata, "layout": share.layout}) if share.layout else component
        )

    def _share(self, key: str, tensors: Mapping[str, Tensor] | None, doing: str) -> _Share | None:
        """What this rank writes; None if a rank has no state. Collective."""
        world, known = self._world, self._known.get(key)
        form = None if tensors is None else _form(tensors)
        is_other = form is None or known is None or known.form != form
        if not world.agree([int(is_other)])[0]:
            return known
        everyone = world.gather(together(world, partial(_local_plan, key, tensors), doing))
        if tensors is None or form is None or None in everyone:
            return None
        names = together(world, partial(_own_names, key, everyone, world.rank), doing)
        boxes = {name: box for name in tensors if name in names and (box := box_of(tensors[name])) is not None}
        self._known[key] = _Share(form, boxes, _layout(tensors))
        return self._known[key]


def _form(tensors: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """What a division depends on; cheap, and equal as long as a model stays as it is."""
    return tuple((name, tensor.shape, tensor.dtype, *_lie(tensor)) for name, tensor in tensors.items())


def _lie(tensor: Tensor) -> tuple[Any, ...]:
    dtensor = as_dtensor(tensor)
    return () if dtensor is None else (dtensor.device_mesh, dtensor.placements)


def _local_plan(key: str, tensors: Mapping[str, Tensor] | None) -> tuple[tuple[str, ...], SavePlan] | None:
    """The names of all tensors, and the parts that this rank could write."""
    if tensors is None:
        return None
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # costs 0.4 s to import

    for name, tensor in tensors.items():
        dtensor = as_dtensor(tensor)
        if dtensor is not None and any(placement.is_partial() for placement in dtensor.placements):
            raise UnsupportedStateError(
                f"{key}.{name}: a DTensor whose ranks hold summands (Partial) has no parts to save; redistribute it "
                f"to Replicate() or Shard(dim) before."
            )
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    plan = planner.create_local_plan()
    # an empty part is written only where the tensor is as empty
    return tuple(tensors), replace(plan, items=[item for item in plan.items if _has_content(item)])


def _has_content(item: Any) -> bool:
    data = item.tensor_data
    return bool(math.prod(data.chunk.sizes) or not math.prod(data.size))


def _own_names(key: str, everyone: list[tuple[tuple[str, ...], SavePlan]], rank: int) -> frozenset[str]:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    wanted = set(everyone[0][0])
    plans = []
    for other, (names, plan) in enumerate(everyone):
        foreign = {item.index.fqn for item in plan.items} - wanted
        lacking = wanted - set(names)
        if foreign or lacking:
            name, has = (min(foreign), "has") if foreign else (min(lacking), "lacks")
            raise CheckpointError(
                f"rank {other} {has} the tensor {key}.{name}, unlike rank 0; a component that is SHARDED must have "
                f"the same tensors on all ranks, so use PER_RANK for one that has not."
            )
        plans.append(plan)
    try:
        final, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    except ValueError as error:
        raise CheckpointError(
            f"the ranks do not hold each element of {key} as one layout says: {error}; make its DTensors by "
            f"distribute_tensor or fully_shard."
        ) from error
    return frozenset(item.index.fqn for item in final[rank].items)


def _layout(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """How DTensors lie on their meshes, and how many lie so, for a manifest."""
    found: Counter[tuple[tuple[tuple[str, int], ...], tuple[str, ...]]] = Counter()
    for tensor in tensors.values():
        dtensor = as_dtensor(tensor)
        if dtensor is not None and dtensor.device_mesh.get_coordinate() is not None:
            mesh = dtensor.device_mesh
            axes = mesh.mesh_dim_names or tuple(f"axis_{number}" for number in range(mesh.ndim))
            sizes = tuple((axis, mesh.size(number)) for number, axis in enumerate(axes))
            found[sizes, tuple(map(repr, dtensor.placements))] += 1
    return [
        {"mesh": dict(mesh), "placements": list(placements), "tensors": count}
        for (mesh, placements), count in found.items()
    ]
