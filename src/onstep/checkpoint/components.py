"""Defines the components of a checkpoint: named states, how ranks share them, and which rank writes and reads what."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import torch.distributed as dist

from onstep.distributed import World
from onstep.errors import ConfigError


class Stateful(Protocol):
    """Anything whose state is a dictionary; torch's own Stateful protocol.

    It may have a method `make_durable()`, for files that its state refers to: it is called on every rank before the
    checkpoint is committed, in another thread, and should fsync them. An exception fails the save.

    It may have a method `destinations(outline)`, for a state in shards (`SharingPattern.SHARDED`): it gets the stored
    state with a tensor on the meta device for each one that is still in its file, of the shape of the whole tensor, and
    returns the same with the tensors (plain, or DTensors) that this rank's part is to be read into in their place.
    Those that it leaves there are read whole. `load_state_dict` is then called with the result, filled. Without the
    method, the tensors of its `state_dict()` are filled.
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`."""
        ...


def make_durable(part: object) -> None:
    """Call the part's `make_durable()`, if it has one."""
    own = getattr(part, "make_durable", None)
    if callable(own):
        own()


class SharingPattern(StrEnum):
    """Sharing of a component's state among ranks; the values are Forgather's."""

    GLOBAL = "global"
    """One state for the whole run: rank 0 saves it, all ranks load it."""
    PER_RANK = "per_rank"
    """Each rank saves and loads its own."""
    REPLICATED = "replicated"
    """Identical on all ranks: rank 0 saves it, all ranks load it; equality can be validated."""
    PER_GROUP = "per_group"
    """One state per instance of a process group: its first rank saves it, all its ranks load it."""
    PER_NODE = "per_node"
    """One state per machine: its first rank saves it, all its ranks load it."""
    SHARDED = "sharded"
    """One state, of which DTensors are parts: each rank saves a share of it, and loads what it holds, on any layout."""


WHOLE = (SharingPattern.GLOBAL, SharingPattern.REPLICATED, SharingPattern.SHARDED)
"""The patterns of a state that all ranks share; what was saved by one can be loaded by another."""


VALIDATION_LEVELS = ("none", "quick", "tensor", "full")


@dataclass
class StateComponent:
    """One named state in a checkpoint.

    Raises:
        ConfigError: for an invalid combination of fields.
    """

    key: str
    """Base name of its files: letters, digits, '_' and '-'."""
    stateful: Stateful
    """The object whose `state_dict()` is saved."""
    sharing_pattern: SharingPattern
    """Which ranks have a state of their own."""
    process_group_name: str | None = None
    """The process group, for PER_GROUP."""
    required: bool = True
    """Whether loading fails for a checkpoint without it."""
    validate_replication: bool = False
    """Compare the state across ranks at each save, for REPLICATED, and for SHARDED what several ranks hold."""
    validation_level: str = "tensor"
    """none | quick (structure and the first values of each tensor) | tensor (all tensors) | full (everything)"""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Facts about it, which the manifest has."""
    at_root: bool = False
    """Write the tensors to `<key>.safetensors` in the checkpoint itself, where other programs look for weights."""

    def __post_init__(self) -> None:
        self.sharing_pattern = SharingPattern(self.sharing_pattern)
        if not self.key or not all(letter.isalnum() or letter in "_-" for letter in self.key):
            raise ConfigError(f"key={self.key!r} of a StateComponent must consist of letters, digits, '_' and '-'.")
        if self.sharing_pattern is SharingPattern.PER_GROUP and self.process_group_name is None:
            raise ConfigError(f"{self.key}: PER_GROUP requires the name of a process group; set process_group_name.")
        if self.validate_replication and self.sharing_pattern not in WHOLE[1:]:
            raise ConfigError(
                f"{self.key}: validate_replication requires REPLICATED or SHARDED, got {self.sharing_pattern.name}; "
                f"only replicas can be compared."
            )
        if self.validation_level not in VALIDATION_LEVELS:
            raise ConfigError(
                f"{self.key}: validation_level={self.validation_level!r} must be {' | '.join(VALIDATION_LEVELS)}."
            )


@dataclass(frozen=True)
class ComponentFiles:
    """Paths of a component's files, relative to the checkpoint."""

    tensors: str
    """Absent if the state has no tensors."""
    document: str
    """The rest of the state, as typed JSON."""


def tensors_at(key: str, at_root: bool) -> str:
    """The tensor file of a component whose state all ranks share, relative to the checkpoint."""
    return f"{key}.safetensors" if at_root else f"{key}/{key}.safetensors"


def shards_at(key: str, rank: int) -> str:
    """The tensor file of a rank's share of a component in shards, relative to the checkpoint."""
    return f"{key}/rank_{rank}.safetensors"


@dataclass(frozen=True)
class Seat:
    """The position of a rank among the instances of a group, or among the machines."""

    index: int
    """The instance's index, in the order of their first ranks."""
    leader: int
    """The first rank of the instance."""


@dataclass(frozen=True)
class Placement:
    """A rank's position in the world, its machine and its groups; computed once by `find_placement`."""

    rank: int = 0
    node: Seat = Seat(0, 0)
    groups: Mapping[str, Seat] = field(default_factory=dict)

    def files(self, component: StateComponent, pattern: SharingPattern | None = None) -> ComponentFiles:
        """This rank's files of the component.

        Args:
            component: the component to write or read.
            pattern: the pattern it was saved with, if that differs from the component's.

        Raises:
            ConfigError: for a group that this run does not have.
        """
        key, (instance, _) = component.key, self._instance(component, pattern or component.sharing_pattern)
        if (pattern or component.sharing_pattern) is SharingPattern.SHARDED:
            return ComponentFiles(shards_at(key, self.rank), f"{key}/state.json")
        if instance is None:
            return ComponentFiles(tensors_at(key, component.at_root), f"{key}/state.json")
        return ComponentFiles(f"{key}/{instance}.safetensors", f"{key}/{instance}.json")

    def writes(self, component: StateComponent) -> bool:
        """Whether this rank writes the component; of one in shards, the document.

        Raises:
            ConfigError: for a group that this run does not have.
        """
        _, writer = self._instance(component, component.sharing_pattern)
        return writer == self.rank

    def _instance(self, component: StateComponent, pattern: SharingPattern) -> tuple[str | None, int]:
        """The name of this rank's state among several (None if all ranks share one), and the rank that writes it."""
        if pattern is SharingPattern.PER_RANK:
            return f"rank_{self.rank}", self.rank
        if pattern is SharingPattern.PER_NODE:
            return f"node_{self.node.index}", self.node.leader
        if pattern is SharingPattern.PER_GROUP:
            group = self._group(component)
            return f"group_{component.process_group_name}_{group.index}", group.leader
        return None, 0

    def _group(self, component: StateComponent) -> Seat:
        name = component.process_group_name
        if name is None or name not in self.groups:
            known = ", ".join(sorted(self.groups)) or "none"
            raise ConfigError(
                f"{component.key}: process_group_name={name!r} must be a group of this run ({known}); pass it to "
                f"CheckpointManager as an item of `groups`."
            )
        return self.groups[name]


def find_placement(world: World, groups: Mapping[str, Any]) -> Placement:
    """This rank's placement. Collective over all ranks of the world, whichever groups they belong to."""
    members = {name: tuple(_ranks(world, group)) for name, group in groups.items()}
    # identify the machine by torchrun's node rank, since two machines may share a host name
    everywhere = world.gather((os.environ.get("GROUP_RANK") or socket.gethostname(), members))
    nodes = [node for node, _ in everywhere]
    seats = {name: _seat([theirs.get(name) for _, theirs in everywhere], world.rank) for name in members}
    return Placement(world.rank, _seat(nodes, world.rank), seats)


def _seat(instances: list[Any], rank: int) -> Seat:
    """The seat of `rank`, where rank r belongs to `instances[r]` (None: to no instance)."""
    in_order = list(dict.fromkeys(instance for instance in instances if instance is not None))
    return Seat(in_order.index(instances[rank]), instances.index(instances[rank]))


def _ranks(world: World, group: Any) -> list[int]:
    """Global ranks of a process group; None is the whole world."""
    if group is None or world.size == 1:
        return list(range(world.size))
    return sorted(dist.get_process_group_ranks(group))
