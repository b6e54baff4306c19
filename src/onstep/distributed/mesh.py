"""The axes of a run's ranks: the place of each rank on them, and the process groups along them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onstep.config.parallel_sizes import ParallelSizes
from onstep.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of `World.mesh`; ranks that differ in the last one only are neighbors."""
EXPERT_AXES = ("pp", "expt_dp", "ep", "expt_tp")
"""The axes of `World.expert_mesh`, which sees the same ranks as the experts of a layer do."""


@dataclass(frozen=True)
class Grid:
    """The ranks 0, 1, 2, ... in a box, row by row: arithmetic, without communication."""

    axes: tuple[str, ...]
    """The name of each axis."""
    shape: tuple[int, ...]
    """The number of ranks along each axis."""

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        place = {}
        for axis, size in zip(reversed(self.axes), reversed(self.shape), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axes}

    def along(self, axes: tuple[str, ...], rank: int) -> list[int]:
        """The ranks, ascending, that differ from a rank on these axes only; the rank itself is among them."""
        own = self.coordinates(rank)
        fixed = [axis for axis in self.axes if axis not in axes]
        everyone = ((other, self.coordinates(other)) for other in range(math.prod(self.shape)))
        return [other for other, place in everyone if all(place[axis] == own[axis] for axis in fixed)]


def grid_of(sizes: ParallelSizes) -> Grid:
    """The box of `AXES`."""
    return Grid(AXES, (sizes.pp, sizes.dp_replicate, sizes.dp_shard, sizes.cp, sizes.tp))


def expert_grid_of(sizes: ParallelSizes) -> Grid:
    """The box of `EXPERT_AXES`."""
    return Grid(EXPERT_AXES, (sizes.pp, sizes.data * sizes.cp // sizes.ep, sizes.ep, sizes.tp))


def check_sizes(sizes: ParallelSizes, ranks: int) -> None:
    """Refuse (ConfigError) sizes that do not make up the ranks of a run."""
    if any(size < 1 for size in vars(sizes).values()):
        raise ConfigError(f"each parallel size must be at least 1, got {sizes}.")
    if sizes.ranks != ranks:
        factors = " * ".join(f"{axis} {getattr(sizes, axis)}" for axis in AXES)
        raise ConfigError(
            f"{factors} = {sizes.ranks} must be the number of ranks, got {ranks}; change the sizes, or start "
            f"{sizes.ranks} ranks."
        )
    if sizes.data * sizes.cp % sizes.ep:
        raise ConfigError(
            f"dp_replicate * dp_shard * cp = {sizes.data * sizes.cp} must be a multiple of ep {sizes.ep}; change them."
        )


class RankGroups:
    """The process groups along the axes of a run, made when they are first asked for; one for each set of ranks.

    Args:
        sizes: the number of ranks along each axis.
        rank: this rank.
        device: its device.
        timeout: the time limit of a collective; None for torch's default.
    """

    def __init__(self, sizes: ParallelSizes, rank: int, device: torch.device, timeout: timedelta | None = None) -> None:
        self._grids, self._rank = (grid_of(sizes), expert_grid_of(sizes)), rank
        self._device, self._timeout = device, timeout
        self._made: dict[tuple[int, ...], ProcessGroup] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    def over(self, axes: tuple[str, ...]) -> ProcessGroup:
        """The group of the ranks that differ from this one on these axes only; collective among them, the first time.

        The default group if these are all ranks.

        Args:
            axes: of `AXES`, or of `EXPERT_AXES`.

        Raises:
            ConfigError: for an unknown axis, or if the process group has other ranks than the axes.
        """
        grid = next((one for one in self._grids if set(axes) <= set(one.axes)), None)
        if grid is None:
            raise ConfigError(f"{axes} must be axes of {AXES}, or of {EXPERT_AXES}.")
        ranks = math.prod(grid.shape)
        there = dist.get_world_size() if dist.is_initialized() else 0
        if there != ranks:
            raise ConfigError(
                f"a mesh is one of all ranks of the process group, which has {there}, but this world has {ranks}; use "
                f"the world that open_world returns."
            )
        members = grid.along(axes, self._rank)
        if len(members) == ranks:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        if tuple(members) not in self._made:
            # the ranks outside need not know: groups of one are made for each rank by itself
            made = dist.new_group(
                members, timeout=self._timeout, use_local_synchronization=True, group_desc="_".join(axes) or "self"
            )
            assert isinstance(made, ProcessGroup)
            self._made[tuple(members)] = made
        return self._made[tuple(members)]

    def mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh of all ranks with `AXES` or `EXPERT_AXES`; collective the first time."""
        if axes not in self._meshes:
            grid = next(one for one in self._grids if one.axes == axes)
            ranks = torch.arange(math.prod(grid.shape), dtype=torch.int).view(grid.shape)
            groups = [self.over((axis,)) for axis in axes]
            self._meshes[axes] = DeviceMesh.from_group(groups, self._device.type, mesh=ranks, mesh_dim_names=axes)
        return self._meshes[axes]

    def close(self, *, waits: bool) -> None:
        """Leave the groups that were made here.

        Args:
            waits: False after an error, when the other ranks might be elsewhere.
        """
        for group in self._made.values():
            if waits:
                dist.destroy_process_group(group)
            else:
                dist.distributed_c10d._abort_process_group(group)
        self._made.clear()
        self._meshes.clear()
