"""The states of a model and its optimizer whose parts are on the ranks of a pipeline, as those of one whole.

Every rank names all tensors, as a component in shards must. One that is on another stage is a DTensor of no rank that
is here: it is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onstep.checkpoint import ModelState
from onstep.distributed import World
from onstep.distributed.pipeline.elsewhere import destinations_here, items_of_stages, of_all_stages, stand_in
from onstep.events.context import unwrap
from onstep.train_state import StateDict
from onstep.training.checkpointing.optimizer_state import OptimizerState
from onstep.training.protocols import UserOptimizer


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
            name: own[name] if name in own else stand_in(shape, dtype, self._world)
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
        here = {name: found[first] for name, first in known.items() if first in found}
        return destinations_here(here, outline, self._world)

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
        groups = self._merged(items_of_stages(own["param_groups"], self._world))
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
