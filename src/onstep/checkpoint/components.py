"""What a checkpoint is made of: named states, and on which ranks each of them differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from onstep.errors import ConfigError


class Stateful(Protocol):
    """Anything whose state is a dictionary; torch's own Stateful protocol."""

    def state_dict(self) -> dict[str, Any]:
        """The state, as tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that `state_dict` gave."""
        ...


class SharingPattern(StrEnum):
    """On which ranks a component's state differs; the values are Forgather's."""

    GLOBAL = "global"
    """One state for the whole run: rank 0 saves it, all ranks load it."""
    PER_RANK = "per_rank"
    """Each rank saves and loads its own."""
    REPLICATED = "replicated"
    """The same on all ranks: rank 0 saves it, all load it; equality can be validated."""
    PER_GROUP = "per_group"
    """One state for each instance of a process group: its first rank saves it, its ranks load it."""
    PER_NODE = "per_node"
    """One state for each machine: its first rank saves it, its ranks load it."""


VALIDATION_LEVELS = ("none", "quick", "tensor", "full")


@dataclass
class StateComponent:
    """One named part of a checkpoint.

    Raises:
        ConfigError: for a combination that has no meaning.
    """

    key: str
    """Name of its files: letters, digits, '_' and '-'."""
    stateful: Stateful
    sharing_pattern: SharingPattern
    process_group_name: str | None = None
    """Which group, for PER_GROUP."""
    required: bool = True
    """A checkpoint without it cannot be loaded."""
    validate_replication: bool = False
    """Compare the state across ranks at each save, for REPLICATED."""
    validation_level: str = "tensor"
    """none | quick (structure and the first values of each tensor) | tensor (all tensors) | full (everything)"""
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sharing_pattern = SharingPattern(self.sharing_pattern)
        if not self.key or not all(letter.isalnum() or letter in "_-" for letter in self.key):
            raise ConfigError(f"key={self.key!r} of a StateComponent must be of letters, digits, '_' and '-'.")
        if self.sharing_pattern is SharingPattern.PER_GROUP and self.process_group_name is None:
            raise ConfigError(f"{self.key}: PER_GROUP takes the name of its group; set process_group_name.")
        if self.validate_replication and self.sharing_pattern is not SharingPattern.REPLICATED:
            raise ConfigError(
                f"{self.key}: validate_replication takes REPLICATED, got {self.sharing_pattern.name}; only replicas "
                f"can be compared."
            )
        if self.validation_level not in VALIDATION_LEVELS:
            raise ConfigError(
                f"{self.key}: validation_level={self.validation_level!r} must be {' | '.join(VALIDATION_LEVELS)}."
            )
