"""Buckets: parameters of which each rank updates some rows; their gradients are summed, and their values gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.dlpack import from_dlpack

from onstep.distributed.shards import as_dtensor, held_part

REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""Torch 2.13 renamed them."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that divide the updates of one model between them."""

    mesh: DeviceMesh
    """Its last dimension has the ranks that divide the rows; along one before it, others do the same with a replica."""
    beside_tensors: Callable[[DeviceMesh], DeviceMesh] | None = field(default=None, compare=False)
    """Given the mesh of tensor-parallel ranks, one with the dimensions of `mesh` after its own. Collective."""
    beside: ProcessGroup | None = field(default=None, compare=False)
    """Another group of the ranks that divide the rows, for gathers that other collectives are not to wait for."""

    @property
    def shards(self) -> ProcessGroup:
        """The ranks that divide the rows."""
        return self.mesh.get_group(self.mesh.ndim - 1)

    @property
    def gathering(self) -> ProcessGroup:
        """The group in which these gather."""
        return self.beside or self.shards

    @property
    def replicas(self) -> ProcessGroup | None:
        """The ranks with the same rows; None if there are no others."""
        return self.mesh.get_group(0) if self.mesh.ndim > 1 else None

    def mesh_of(self, parameter: Tensor) -> DeviceMesh:
        """The mesh of what an optimizer updates for a parameter. Collective for the first DTensor of a mesh.

        Args:
            parameter: a plain one, or a DTensor of tensor-parallel ranks.
        """
        dtensor = as_dtensor(parameter)
        if dtensor is None:
            return self.mesh
        assert self.beside_tensors is not None, "a DTensor among replicas"
        return self.beside_tensors(dtensor.device_mesh)

    @property
    def size(self) -> int:
        """The number of parts."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """The part of this rank."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter of a bucket."""

    name: str
    parameter: nn.Parameter
    """A view of the bucket's values, or a DTensor whose part on this rank is one."""
    gradient: Tensor
    """A view of the bucket's gradients, of the shape of what this rank holds of the parameter."""
    shard: nn.Parameter
    """What the optimizer updates: the parameter as a DTensor, whose part on this rank is a view of its rows."""
    shard_gradient: Tensor
    """The sum over the ranks for these rows, as a DTensor."""
    has_summands: bool = False
    """Whether the ranks of the last dimension of a DTensor's mesh have summands of its gradient."""

    @property
    def first_grad(self) -> Tensor | None:
        """`grad` of the parameter before a backward pass, to which autograd adds; a DTensor has none."""
        return self.gradient if as_dtensor(self.parameter) is None else None

    def take_from_parameter(self) -> None:
        """Add `grad` of the parameter, if it is not in the buffer: of a DTensor, or where somebody has cleared it."""
        grad = self.parameter.grad
        if grad is None or grad is self.gradient:
            return
        known = as_dtensor(grad)
        if known is not None:
            from torch.distributed.tensor import Partial

            wanted = list(self.parameter.placements)  # type: ignore[attr-defined]
            if self.has_summands:
                wanted[-1] = Partial()
            grad = known.redistribute(placements=wanted).to_local()
        self.gradient.add_(grad)
        self.parameter.grad = self.first_grad

    @property
    def summing(self) -> ProcessGroup:
        """The ranks that have summands of its gradient."""
        mesh: DeviceMesh = self.parameter.device_mesh  # type: ignore[attr-defined]
        return mesh.get_group(mesh.ndim - 1)


class Bucket:
    """Parameters of one type, one after the other in a flat tensor, each with room for rows that the ranks divide.

    The rows of a rank are those of torch's `Shard(0)`, so that states of optimizers are divided as FSDP2 divides them.

    Args:
        named: the parameters, with their names; each becomes a view.
        values: flat, with the room of `room` for each parameter.
        gradients: as long.
        ranks: the ranks that divide the rows.
        summed_in: the type in which gradients are summed; None is their own.
        summands: the ids of DTensors of whose gradients tensor-parallel ranks have summands.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        values: Tensor,
        gradients: Tensor,
        ranks: Ranks,
        summed_in: torch.dtype | None = None,
        summands: Set[int] = frozenset(),
    ) -> None:
        self.ranks, self._summed_in = ranks, summed_in
        self._sizes = [room(parameter, ranks.size) // ranks.size for _, parameter in named]
        """The elements of a rank, of each parameter."""
        rooms = [size * ranks.size for size in self._sizes]
        self._values, self._gradients = torch.split(values, rooms), torch.split(gradients, rooms)
        self._received = gradients.new_empty(sum(self._sizes))
        parts = torch.split(self._received, self._sizes)
        places = zip(named, self._values, self._gradients, parts, strict=True)
        self.members = [_member(one, own, gradients, part, ranks, summands) for one, own, gradients, part in places]
        self._summing: _Sum | None = None
        """The sum that is being computed."""
        self._gathering: tuple[dist.Work | None, Tensor] | None = None
        """The gather in flight, and what it fills."""
        self.is_current = True
        """Whether the values of all rows are those of the last update, or are being gathered."""

    @property
    def device(self) -> torch.device:
        """That of the parameters."""
        return self._received.device

    @torch.no_grad()
    def start_sum(self) -> None:
        """Begin to sum the gradients over the ranks. Collective."""
        sent = _by_rank(self._gradients, self.ranks.size)
        if self._summed_in is not None:
            sent = sent.to(self._summed_in)
        result = self._received if sent.dtype == self._received.dtype else sent.new_empty(len(self._received))
        self._summing = _Sum(result, sent, self.ranks)

    @torch.no_grad()
    def finish_sum(self) -> None:
        """Wait for the sum, which is then in the gradients of the shards. Collective where there are replicas."""
        assert self._summing is not None, "no sum was begun"
        result = self._summing.wait()
        if self.ranks.replicas is not None:
            dist.all_reduce(result, group=self.ranks.replicas)
        if result is not self._received:
            self._received.copy_(result)
        self._summing = None

    def start_gather(self) -> None:
        """Begin to gather the rows of all ranks, unless that has begun. Collective."""
        if self._gathering is not None or self.is_current:
            return
        parts = [one.view(self.ranks.size, -1)[self.ranks.rank] for one in self._values]
        if len(parts) == 1:  # in place
            own, filled = parts[0], self._values[0]
        else:
            own = torch.cat(parts)
            filled = own.new_empty(self.ranks.size * len(own))
        work = getattr(dist, ALL_GATHER)(filled, own, group=self.ranks.gathering, async_op=True)
        self._gathering, self.is_current = (work, filled), True

    def join(self, ranks: Ranks) -> None:
        """Use the groups of another world: what was in flight in the last one has failed, and is begun again.

        Args:
            ranks: the same as before, in that world.
        """
        self.ranks, self._summing = ranks, None
        for one in self.members:
            ranks.mesh_of(one.parameter)  # has the groups of that world then
        if self._gathering is not None:
            self._gathering, self.is_current = None, False

    def finish_gather(self) -> None:
        """Wait for a gather that has begun."""
        if self._gathering is None:
            return
        work, filled = self._gathering
        wait(work)
        self._gathering = None
        if filled is not self._values[0]:
            places = [one.view(self.ranks.size, -1) for one in self._values]
            torch.split_with_sizes_copy(filled.view(self.ranks.size, -1), self._sizes, dim=1, out=places)


class _Sum:
    """A sum over ranks that is being computed, of which each rank gets its part. Collective.

    Gloo would scatter it by summing all parts on every rank, which sends twice as much: so on a CPU each rank gets the
    summands of its own part, and adds them up in the order of the ranks.

    Args:
        result: this rank's part of the sum.
        sent: the summands, by rank.
        ranks: the ranks that get the parts.
    """

    def __init__(self, result: Tensor, sent: Tensor, ranks: Ranks) -> None:
        self._result, self._ranks = result, ranks.size
        self._sent = sent  # is read until the sum is there
        self._summands: Tensor | None = None
        self._work: dist.Work | None
        if sent.device.type == "cpu":
            self._summands = torch.empty_like(sent)
            self._work = dist.all_to_all_single(self._summands, sent, group=ranks.shards, async_op=True)
        else:
            self._work = getattr(dist, REDUCE_SCATTER)(result, sent, group=ranks.shards, async_op=True)

    def wait(self) -> Tensor:
        """The result, when it is there."""
        wait(self._work)
        if self._summands is not None:
            torch.sum(self._summands.view(self._ranks, -1), 0, out=self._result)
        return self._result


def room(parameter: Tensor, ranks: int) -> int:
    """The number of elements of what this rank holds of a parameter, with as many rows for each rank.

    Args:
        parameter: of at least one dimension.
        ranks: the number of ranks that divide it.
    """
    shape = held_part(parameter).shape
    return -(-shape[0] // ranks) * ranks * math.prod(shape[1:])


@torch.no_grad()
def _member(
    named: tuple[str, nn.Parameter],
    values: Tensor,
    gradients: Tensor,
    received: Tensor,
    ranks: Ranks,
    summands: Set[int],
) -> Member:
    from torch.distributed.tensor import DTensor, Replicate, Shard  # importing DTensor costs 0.7 s

    name, parameter = named
    held, dtensor = held_part(parameter), as_dtensor(parameter)
    shape, size, columns = held.shape, held.numel(), math.prod(held.shape[1:])
    start = min(len(received) * ranks.rank, size)
    own = min(len(received), size - start)
    rows = (own // columns if columns else 0, *shape[1:])
    values[:size].copy_(held.flatten())
    view = _with_own_storage(values[:size]).view(shape)
    if dtensor is None:
        parameter.data = view
    else:
        dtensor._local_tensor = view
    of_tensors = () if dtensor is None else dtensor.placements
    placements = [*of_tensors, *[Replicate()] * (ranks.mesh.ndim - 1), Shard(0)]
    mesh = ranks.mesh_of(parameter)

    def divided(part: Tensor) -> DTensor:
        return DTensor.from_local(
            part.view(rows), mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    shard = nn.Parameter(divided(values[start : start + own]))
    shard.model_parameter, parameter.updated_shard = parameter, shard  # type: ignore[attr-defined]
    shard.shared = getattr(parameter, "shared", False)  # type: ignore[attr-defined]
    gradient = gradients[:size].view(shape)
    return Member(name, parameter, gradient, shard, divided(received[:own]), id(parameter) in summands)


def _with_own_storage(view: Tensor) -> Tensor:
    """The same memory as a tensor by itself: what writes state dicts refuses, or writes whole, a storage of many."""
    return from_dlpack(view) if view.numel() else view


def _by_rank(parts: Sequence[Tensor], ranks: int) -> Tensor:
    """The elements of the first rank, then those of the second, and so on."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([one.view(ranks, -1) for one in parts], dim=1).flatten()


def wait(work: dist.Work | None) -> None:
    """Wait for a collective, if there is one to wait for.

    Args:
        work: of a collective that was begun.
    """
    if work is not None:
        work.wait()
