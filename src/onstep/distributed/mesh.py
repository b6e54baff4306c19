"""The axes of a run's ranks: the place of each rank on them, and the process groups along them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from onstep.config.parallel_sizes import ParallelSizes
from onstep.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of `World.mesh`; ranks that differ in the last one only are neighbors."""
EXPERT_AXES = ("pp", "expt_dp", "ep", "expt_tp")
"""The axes of `World.expert_mesh`, which sees the same ranks as the experts of a layer do."""
_BLOCK_AXES = ("tp_block", "tp_copy")
"""What `tp` becomes where the ranks of a block have the same part of a weight."""

_MESHES: dict[DeviceMesh, DeviceMesh] = {}
"""The meshes of all worlds of this process, each by itself, for the next world with the same ranks."""


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

    def ranks(self) -> Tensor:
        """The ranks, by their places: a tensor of `shape`."""
        return torch.arange(math.prod(self.shape), dtype=torch.int).view(self.shape)

    def parts(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All ranks, divided into those that differ on these axes only."""
        fixed = [number for number, axis in enumerate(self.axes) if axis not in axes]
        along = [number for number, axis in enumerate(self.axes) if axis in axes]
        size = math.prod(self.shape[number] for number in along)
        return [tuple(part) for part in self.ranks().permute(*fixed, *along).reshape(-1, size).tolist()]


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
        self._made: dict[tuple[object, ...], ProcessGroup | None] = {}
        self._meshes: dict[tuple[str, ...], DeviceMesh] = {}

    @property
    def made(self) -> list[ProcessGroup]:
        """The groups that exist and have this rank, but for the default group."""
        return [group for group in self._made.values() if group is not None]

    def over(self, axes: tuple[str, ...]) -> ProcessGroup:
        """The group of the ranks that differ from this one on these axes only. Collective over all ranks, once.

        The default group if these are all ranks.

        Args:
            axes: of `AXES`, or of `EXPERT_AXES`.

        Raises:
            ConfigError: for an unknown axis, or if the process group has other ranks than the axes.
        """
        return self._within(self.parts(axes), "_".join(axes) or "self")

    def parts(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """All ranks, divided into those that differ on these axes only, without communication.

        Args:
            axes: of `AXES`, or of `EXPERT_AXES`.

        Raises:
            ConfigError: for an unknown axis.
        """
        grid = next((one for one in self._grids if set(axes) <= set(one.axes)), None)
        if grid is None:
            raise ConfigError(f"{axes} must be axes of {AXES}, or of {EXPERT_AXES}.")
        return grid.parts(axes)

    def own_of(self, parts: list[tuple[int, ...]], name: str, *, is_apart: bool = False) -> ProcessGroup | None:
        """The group of that part which has this rank; None if none has. Collective over all ranks, once.

        Args:
            parts: disjoint, each ascending, the same on all ranks.
            name: a description of the groups, for torch's messages.
            is_apart: whether it is another group than that of the same ranks for other purposes.

        Raises:
            ConfigError: if the process group has other ranks than the axes.
        """
        ranks = math.prod(self._grids[0].shape)
        there = dist.get_world_size() if dist.is_initialized() else 0
        if there != ranks:
            raise ConfigError(
                f"a mesh is one of all ranks of the process group, which has {there}, but this world has {ranks}; use "
                f"the world that open_world returns."
            )
        if len(parts[0]) == ranks and not is_apart:
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        own = next((part for part in parts if self._rank in part), ())
        known: tuple[object, ...] = (*(own if own else parts), *([name] if is_apart else []))
        if known not in self._made:
            # all ranks make all groups, in the same order: names that torch derives from the ranks alone would let a
            # later world find the addresses of an earlier one's group. Alone, a rank has nobody to find
            alone = len(own) == 1
            self._made[known] = None
            for part in [own] if alone else [part for part in parts if len(part) > 1]:
                made = dist.new_group(
                    list(part), timeout=self._timeout, use_local_synchronization=alone, group_desc=name
                )
                if part == own:
                    assert isinstance(made, ProcessGroup)
                    self._made[known] = made
        return self._made[known]

    def mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh of all ranks with `AXES` or `EXPERT_AXES`; collective the first time."""
        if axes not in self._meshes:
            grid = next(one for one in self._grids if one.axes == axes)
            groups = [self.over((axis,)) for axis in axes]
            self._meshes[axes] = _renewed(
                DeviceMesh.from_group(groups, self._device.type, mesh=grid.ranks(), mesh_dim_names=axes)
            )
        return self._meshes[axes]

    def part_of_mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh of the ranks that differ from this one on these axes only. Collective the first time.

        Args:
            axes: of `AXES`.
        """
        if axes not in self._meshes:
            self._meshes[axes] = _renewed(self.mesh(AXES)[axes])
        return self._meshes[axes]

    def tensor_blocks(self, blocks: int) -> DeviceMesh:
        """The tensor-parallel ranks in blocks of neighbors, a mesh of two dimensions. Collective the first time.

        Args:
            blocks: their number, which divides that of the ranks.
        """
        key = ("tp", str(blocks))
        if key not in self._meshes:
            *rest, ranks = self._grids[0].shape
            grid = Grid((*AXES[:-1], *_BLOCK_AXES), (*rest, blocks, ranks // blocks))
            groups = [self.over((axis,)) for axis in AXES[:-1]]
            groups += [self._within(grid.parts((axis,)), axis) for axis in _BLOCK_AXES]
            whole = DeviceMesh.from_group(groups, self._device.type, mesh=grid.ranks(), mesh_dim_names=grid.axes)
            self._meshes[key] = _renewed(whole[_BLOCK_AXES])
        return self._meshes[key]

    def beside_tensors(self, mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
        """A mesh of tensor-parallel ranks, with other axes as its last dimensions. Collective the first time.

        Args:
            mesh: of this rank's tensor-parallel ranks, perhaps in blocks.
            axes: of `AXES`.
        """
        key = ("tp", *map(str, mesh.mesh.shape), *axes)
        if key not in self._meshes:
            own = self.part_of_mesh(("tp",)) if mesh.ndim == 1 else self.tensor_blocks(mesh.size(0))
            ranks = self.part_of_mesh((*axes, "tp")).mesh.movedim(-1, 0)
            made = DeviceMesh.from_group(
                [*own.get_all_groups(), *(self.over((axis,)) for axis in axes)],
                self._device.type,
                mesh=ranks.reshape(*own.mesh.shape, *ranks.shape[1:]),
                mesh_dim_names=(*(own.mesh_dim_names or ()), *axes),
            )
            self._meshes[key] = _renewed(made)
        return self._meshes[key]

    def _within(self, parts: list[tuple[int, ...]], name: str) -> ProcessGroup:
        group = self.own_of(parts, name)
        assert group is not None
        return group

    def close(self, *, waits: bool) -> None:
        """Leave the groups that were made here.

        Args:
            waits: False after an error, when the other ranks might be elsewhere.
        """
        for group in self.made:
            if waits:
                dist.destroy_process_group(group)
            else:
                dist.distributed_c10d._abort_process_group(group)
        for mesh in self._meshes.values():
            vars(mesh).get("_pg_registry", {}).clear()  # the mesh outlives its groups, whose threads would live on
        self._made.clear()
        self._meshes.clear()


def _renewed(mesh: DeviceMesh) -> DeviceMesh:
    """The same mesh of an earlier world, now with the groups of this one, as its DTensors still have it; or this one.

    torch's cache of how operators divide their results has it too, and compares meshes by their ranks alone.
    """
    known = _MESHES.setdefault(mesh, mesh)
    vars(known).update(vars(mesh))
    return known
