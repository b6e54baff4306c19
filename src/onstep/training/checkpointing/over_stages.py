"""The states of a model and its optimizer whose parts are on the ranks of a pipeline, as those of one whole.

Every rank names all tensors, as a component in shards must. One that is on another stage is a DTensor of no rank that
is here: it is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onstep.checkpoint import ModelState
from onstep.distributed import World
from onstep.errors import CheckpointError
from onstep.events.context import unwrap
from onstep.train_state import StateDict
from onstep.training.checkpointing.optimizer_state import OptimizerState
from onstep.training.protocols import UserOptimizer


class _Elsewhere(NamedTuple):
    """A tensor of another stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ModelOverStages(ModelState):
    """The weights of all stages; see `ModelState`.

    Args:
        chunks: the stages of this rank.
        world: the ranks of the run.
    """

    def __init__(self, chunks: Sequence[nn.Module], world: World) -> None:
        super().__init__(chunks)
        self._world = world
        self._whole: dict[str, tuple[int, ...]] = unwrap(chunks[0]).whole_shapes
        self._aliases: dict[str, str] = unwrap(chunks[0]).aliases

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of the model: they do."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """The weights of this rank's stages, in the order of the whole model, and stand-ins for those of the others."""
        own = super().state_dict()
        dtype = next(iter(own.values())).dtype
        state = {
            name: own[name] if name in own else _stand_in(_Elsewhere(shape, dtype), self._world)
            for name, shape in self._whole.items()
        }
        return {name: state[self._aliases.get(name, name)] for name in state}

    def destinations(self, outline: dict[str, Any]) -> dict[str, Any]:
        """Where this rank's part of a stored state goes: see `Stateful`.

        Args:
            outline: the stored state, with tensors on the meta device.
        """
        found = super().destinations(self._of_here(outline))
        known = {name: self._aliases.get(name, name) if name not in found else name for name in outline}
        return {
            name: found[known[name]] if known[name] in found else _absent(value, self._world)
            for name, value in outline.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy the values of this rank's stages.

        Args:
            state_dict: of the whole model.
        """
        super().load_state_dict(self._of_here(state_dict))

    def _of_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """What is of this rank's stages, or of none."""
        own = self._own_tensors()
        return {name: value for name, value in state.items() if name in own or name not in self._whole}


class OptimizerOverStages(OptimizerState):
    """The state of the optimizers of all stages; see `OptimizerState`.

    Args:
        optimizer: of this rank's stages.
        chunks: the stages of this rank.
        world: the ranks of the run.
    """

    def __init__(self, optimizer: UserOptimizer, chunks: Sequence[nn.Module], world: World) -> None:
        super().__init__(optimizer, chunks)
        self._world = world
        self._order: dict[str, int] = {name: place for place, name in enumerate(unwrap(chunks[0]).whole_shapes)}

    def state_dict(self) -> StateDict:
        """The state by name, in the order of the groups, with stand-ins for what is of other stages. Collective."""
        own = super().state_dict()
        state = of_all_stages(own["state"], self._world)
        groups = self._merged(_of_stages(own["param_groups"], self._world))
        in_order = {name: state[name] for group in groups for name in group["params"] if name in state}
        return {**own, "state": in_order | state, "param_groups": groups}

    def destinations(self, outline: StateDict) -> StateDict:
        """Where this rank's part of a stored state goes: see `Stateful`."""
        if not isinstance(outline.get("state"), Mapping):
            return super().destinations(outline)
        found = super().destinations(self._of_here(outline))["state"]
        return {**outline, "state": destinations_here(found, outline["state"], self._world)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load the part of a state that is of this rank's stages."""
        super().load_state_dict(self._of_here(state_dict))

    def _of_here(self, state: StateDict) -> StateDict:
        """What is of the parameters of this rank, or of none; groups of other stages are left out."""
        elsewhere = self._order.keys() - self.parameters().keys()
        groups = [
            {**group, "params": [name for name in group["params"] if name not in elsewhere]}
            for group in state["param_groups"]
        ]
        if len(groups) != len(self._optimizer.param_groups):
            groups = [group for group in groups if group["params"]]
        of_here = {name: value for name, value in state["state"].items() if name not in elsewhere}
        return {**state, "state": of_here, "param_groups": groups}

    def _merged(self, of_stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
        """The groups of all stages: those of the same options, and of the same places unless a stage lacks some."""
        by_place = len({len(groups) for groups in of_stages}) == 1
        merged: dict[object, dict[str, Any]] = {}
        for groups in of_stages:
            for place, group in enumerate(groups):
                options = {key: value for key, value in group.items() if key != "params"}
                key = place if by_place else None, repr(sorted(options.items()))
                known = merged.setdefault(key, {**options, "params": []})
                known["params"] += [name for name in group["params"] if name not in known["params"]]
        for group in merged.values():
            group["params"].sort(key=lambda name: self._order.get(name, len(self._order)))
        return list(merged.values())


def of_all_stages(own: Mapping[str, Any], world: World) -> dict[str, Any]:
    """What all stages have by name of a parameter, with stand-ins for the tensors of others. Collective.

    Args:
        own: of this rank's stages: tensors, or mappings with tensors.
        world: the ranks of the run.
    """
    state: dict[str, Any] = {}
    for values in _of_stages(_outline(own), world):
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


def _of_stages(own: Any, world: World) -> list[Any]:
    """The item of each rank of the pipeline. Collective."""
    [part] = [part for part in world.parts("pp") if world.rank in part]
    everywhere = world.gather(own)
    return [everywhere[rank] for rank in part]


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
        return _stand_in(value, world)
    return {key: _present(item, world) for key, item in value.items()} if isinstance(value, Mapping) else value


def _absent(value: Any, world: World) -> Any:
    """A stored state with stand-ins in place of its meta tensors."""
    if isinstance(value, Tensor):
        return _stand_in(_Elsewhere(tuple(value.shape), value.dtype), world) if value.is_meta else value
    return {key: _absent(item, world) for key, item in value.items()} if isinstance(value, Mapping) else value


def _stand_in(tensor: _Elsewhere, world: World) -> Tensor:
    """A DTensor that another rank has."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    mesh = DeviceMesh("cpu", [(world.rank + 1) % world.size], _init_backend=False)
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(meta.shape, meta.stride(), meta.dtype))
    return DTensor(torch.empty(0, dtype=tensor.dtype), spec, requires_grad=False)  # type: ignore[no-untyped-call]
