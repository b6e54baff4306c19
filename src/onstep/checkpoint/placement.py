"""Which rank writes which file of a component, and which file each rank reads."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from onstep.checkpoint.components import SharingPattern, StateComponent
from onstep.distributed import World
from onstep.errors import ConfigError


@dataclass(frozen=True)
class ComponentFiles:
    """Paths in a checkpoint."""

    tensors: str
    """Not there if the state has no tensor."""
    document: str
    """The rest of the state, as typed JSON."""


@dataclass(frozen=True)
class Seat:
    """The place of a rank among the instances of a group, or among the machines."""

    index: int
    """Which instance, counted in the order of their first ranks."""
    leader: int
    """The first rank of the instance."""


@dataclass(frozen=True)
class Placement:
    """Where a rank stands in the world; made once, by `find_placement`."""

    rank: int = 0
    node: Seat = Seat(0, 0)
    groups: Mapping[str, Seat] = field(default_factory=dict)

    def files(self, component: StateComponent, pattern: SharingPattern | None = None) -> ComponentFiles:
        """This rank's files of the component.

        Args:
            component: what is written or read.
            pattern: the one it was saved with, where that is another than the component's.

        Raises:
            ConfigError: for a group that this run does not have.
        """
        key, pattern = component.key, pattern or component.sharing_pattern
        if pattern is SharingPattern.PER_RANK:
            return _instance_files(f"{key}/rank_{self.rank}")
        if pattern is SharingPattern.PER_NODE:
            return _instance_files(f"{key}/node_{self.node.index}")
        if pattern is SharingPattern.PER_GROUP:
            return _instance_files(f"{key}/group_{component.process_group_name}_{self._group(component).index}")
        return ComponentFiles(f"{key}/{key}.safetensors", f"{key}/state.json")

    def writes(self, component: StateComponent) -> bool:
        """Whether this rank writes the component.

        Raises:
            ConfigError: for a group that this run does not have.
        """
        pattern = component.sharing_pattern
        if pattern is SharingPattern.PER_RANK:
            return True
        if pattern is SharingPattern.PER_NODE:
            return self.node.leader == self.rank
        if pattern is SharingPattern.PER_GROUP:
            return self._group(component).leader == self.rank
        return self.rank == 0

    def _group(self, component: StateComponent) -> Seat:
        name = component.process_group_name
        if name is None or name not in self.groups:
            known = ", ".join(sorted(self.groups)) or "none"
            raise ConfigError(
                f"{component.key}: process_group_name={name!r} must be a group of this run ({known}); pass it to the "
                f"CheckpointManager in `groups`."
            )
        return self.groups[name]


def find_placement(world: World, groups: Mapping[str, Any]) -> Placement:
    """Where this rank stands. Collective, on all ranks of the world, whichever groups they are in."""
    members = {name: tuple(_ranks(world, group)) for name, group in groups.items()}
    # the machine: torchrun's number of it, since two may bear the same host name
    everywhere = world.gather((os.environ.get("GROUP_RANK") or socket.gethostname(), members))
    nodes = [node for node, _ in everywhere]
    seats = {name: _seat([theirs.get(name) for _, theirs in everywhere], world.rank) for name in members}
    return Placement(world.rank, _seat(nodes, world.rank), seats)


def _seat(instances: list[Any], rank: int) -> Seat:
    """Where `rank` stands if rank r belongs to `instances[r]`, None being none."""
    in_order = list(dict.fromkeys(instance for instance in instances if instance is not None))
    return Seat(in_order.index(instances[rank]), instances.index(instances[rank]))


def _instance_files(stem: str) -> ComponentFiles:
    return ComponentFiles(f"{stem}.safetensors", f"{stem}.json")


def _ranks(world: World, group: Any) -> list[int]:
    """Global ranks of a process group; None is the whole world."""
    if group is None or world.size == 1:
        return list(range(world.size))
    return sorted(dist.get_process_group_ranks(group))
