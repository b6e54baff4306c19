"""Gives the process groups of a run under Megatron's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup

from onstep.distributed.world import World
from onstep.errors import ConfigError

GROUPS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "pp": ("pp",),
    "cp": ("cp",),
    "dp": ("dp_replicate", "dp_shard"),
    "dp_cp": ("dp_replicate", "dp_shard", "cp"),
    "mp": ("pp", "tp"),
    "ep": ("ep",),
    "expt_tp": ("expt_tp",),
    "expt_dp": ("expt_dp",),
    "tp_ep_pp": ("pp", "ep", "expt_tp"),
    "tp_dp_cp": ("dp_replicate", "dp_shard", "cp", "tp"),
}
"""The axes of `World.mesh`, or of `World.expert_mesh`, along which each group lies."""
ENDS = ("embd", "pos_embd")
"""The groups of the stages that hold the word embeddings, the first and the last, and the position embeddings."""


class ProcessGroupCollection:
    """The process groups of this rank by Megatron's names, each with `size()` and `rank()`.

    Each is made when it is first asked for, which is collective over all ranks of the run. All ranks are the default
    group.

    Args:
        world: the ranks of the run, which has a process group.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        """The ranks of the run."""

    @property
    def tp(self) -> ProcessGroup:
        """Tensor parallelism: the parts of one layer."""
        return self._along("tp")

    @property
    def pp(self) -> ProcessGroup:
        """Pipeline parallelism: the stages of one model."""
        return self._along("pp")

    @property
    def cp(self) -> ProcessGroup:
        """Context parallelism: the parts of one sequence."""
        return self._along("cp")

    @property
    def dp(self) -> ProcessGroup:
        """Data parallelism: ranks with different samples, and the same part of the model and of the sequence."""
        return self._along("dp")

    @property
    def dp_cp(self) -> ProcessGroup:
        """Data and context parallelism: the ranks whose losses are summed."""
        return self._along("dp_cp")

    @property
    def mp(self) -> ProcessGroup:
        """Model parallelism, tensor and pipeline: the parts of one model."""
        return self._along("mp")

    @property
    def ep(self) -> ProcessGroup:
        """Expert parallelism: ranks with different experts of a layer."""
        return self._along("ep")

    @property
    def expt_tp(self) -> ProcessGroup:
        """Tensor parallelism of experts."""
        return self._along("expt_tp")

    @property
    def expt_dp(self) -> ProcessGroup:
        """Data parallelism of experts: ranks with the same part of the same experts."""
        return self._along("expt_dp")

    @property
    def tp_ep_pp(self) -> ProcessGroup:
        """Model parallelism of experts: the parts of one model with all its experts."""
        return self._along("tp_ep_pp")

    @property
    def tp_dp_cp(self) -> ProcessGroup:
        """All ranks of a pipeline stage."""
        return self._along("tp_dp_cp")

    @property
    def embd(self) -> ProcessGroup | None:
        """The first and the last stage, which hold tied word embeddings; None on the stages between them."""
        return self._of_ends("embd")

    @property
    def pos_embd(self) -> ProcessGroup | None:
        """The first stage, which holds the position embeddings; None on others."""
        return self._of_ends("pos_embd")

    def ranks(self, name: str) -> list[int]:
        """The ranks of a group, ascending, without making it; none if this rank is not in it.

        Args:
            name: one of the properties.
        """
        return next((list(part) for part in self._parts(name) if self.world.rank in part), [])

    def _parts(self, name: str) -> list[tuple[int, ...]]:
        if name in GROUPS:
            return self.world.parts(*GROUPS[name])
        last = -1 if name == "embd" else 0
        return [tuple(sorted({stages[0], stages[last]})) for stages in self.world.parts("pp")]

    def _along(self, name: str) -> ProcessGroup:
        return self.world.group(*GROUPS[name])

    def _of_ends(self, name: str) -> ProcessGroup | None:
        return self.world.group_among(self._parts(name), name)


def groups_within_models(world: World) -> ProcessGroupCollection | None:
    """The groups of a run whose ranks share models or sequences; None with data parallelism alone, which needs none.

    Args:
        world: the ranks of the run.
    """
    return None if world.sizes.data == world.size and world.sizes.ep == 1 else ProcessGroupCollection(world)


def check_groups(given: object, world: World) -> None:
    """Check that process groups that a user passes are those of the run; what is not a process group is not checked.

    Args:
        given: an object with process groups by Megatron's names, or None.
        world: the ranks of the run.

    Raises:
        ConfigError: for a group of other ranks.
    """
    if given is None or isinstance(given, ProcessGroupCollection):
        if given is not None and given.world.sizes != world.sizes:
            raise ConfigError(
                f"pg_collection is that of a world with {given.world.sizes}, but the run has {world.sizes}; pass "
                f"state.pg_collection, or nothing."
            )
        return
    own = ProcessGroupCollection(world)
    for name in (*GROUPS, *ENDS):
        group = getattr(given, name, None)
        if not isinstance(group, ProcessGroup):
            continue
        ranks: Sequence[int] = sorted(dist.get_process_group_ranks(group))
        if ranks != own.ranks(name):
            raise ConfigError(
                f"pg_collection.{name} has the ranks {ranks}, but that group of this run has {own.ranks(name)}, by its "
                f"parallel sizes; pass state.pg_collection, or nothing."
            )
