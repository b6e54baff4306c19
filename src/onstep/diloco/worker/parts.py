"""Divides tensors between the ranks of a worker as its parameters are divided, and moves them to rank 0 and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from onstep.diloco.codec.specs import InvalidTensorsError, master_dtype
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.worker.ranks import on_main
from onstep.distributed.boxes import Box, box_of
from onstep.distributed.shards import as_dtensor, held_part
from onstep.distributed.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class Parts:
    """The part of each parameter that a rank has on the host, in float32, or float64 for parameters in float64.

    It is the rank's part of a DTensor: a shard of FSDP2, or rows that it updates where ranks divide the updates. Plain
    tensors, which are whole on every rank, are divided by rows.

    Args:
        world: the ranks of the worker.
        shards: by name, plain tensors and DTensors; the same names on all ranks.
        specs: of their parameters.
    """

    def __init__(self, world: World, shards: Mapping[str, Tensor], specs: Iterable[ParameterSpec]) -> None:
        self._world, self._shards = world, shards
        self._specs = {spec.name: spec for spec in specs}
        self.boxes = {name: _own_box(shard, world) for name, shard in shards.items()}
        """The part of this rank; an empty one if it has none."""

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of the parts of a parameter."""
        return master_dtype(self._specs[name].dtype)

    def through_main(
        self,
        names: Iterable[str],
        work: Callable[[str, Tensor | None], Tensor | None],
        given: Callable[[str], Tensor] | None = None,
        returns: bool = True,
    ) -> dict[str, Tensor]:
        """Let rank 0 work on whole tensors, one at a time, and give each rank its part of the results. Collective.

        Args:
            names: of parameters.
            work: called on rank 0 with a name and a whole tensor; returns another.
            given: this rank's part of the tensor that `work` gets; without it, that is None.
            returns: whether `work` returns tensors; without them, the result is empty.

        Raises:
            Exception: what `work` has raised.
            MainRankError: on the other ranks, then.
        """
        results: dict[str, Tensor] = {}
        error: Exception | None = None
        for name in names:
            whole, result = None if given is None else self._gather(name, given(name)), None
            if self._world.is_main and error is None:
                try:
                    result = work(name, whole)
                except Exception as raised:  # noqa: BLE001 - raised below; the others wait for this tensor, and the next
                    error = raised
            if returns and (self._world.size > 1 or error is None):
                results[name] = self._scatter(name, result)

        def end(_: World) -> None:
            if error is not None:
                raise error

        on_main(self._world, self._world, end)
        return results

    def everywhere(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor, on every rank. Collective."""
        whole = self._gather(name, part)
        if self._world.size == 1:
            return part
        if whole is None:
            whole = torch.empty(self._specs[name].shape, dtype=part.dtype)
        dist.broadcast(whole, src=0, group=self._world.control_group)
        return whole

    def to_state(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same memory as tensors that a checkpoint in shards can hold.

        Args:
            parts: of this rank.
        """
        return {name: part if self._world.size == 1 else self._as_shard(name, part) for name, part in parts.items()}

    def empty_state(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors into which a checkpoint in shards can be read, as for `to_state`; not of names without parameter."""
        known = [name for name in names if name in self.boxes]
        return self.to_state({name: torch.empty(self.boxes[name].sizes, dtype=self.dtype(name)) for name in known})

    def from_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's parts of saved tensors. Collective.

        Args:
            state: whole tensors, on rank 0, or what `empty_state` has given, on all ranks.

        Raises:
            InvalidTensorsError: for a tensor of a parameter that this model does not have, or of another shape.
        """
        world = self._world
        names, are_whole = on_main(world, state, self._checked)
        if are_whole:
            return self.through_main(names, lambda name, _: state[name].to("cpu", self.dtype(name)))
        if any(world.agree([int(name not in state or not self._is_own(name, state[name])) for name in names])):
            raise InvalidTensorsError(
                "the saved residuals are divided otherwise than the parameters here; load them by "
                "torch.distributed.checkpoint into tensors of this worker, or give rank 0 whole ones."
            )
        return {name: held_part(state[name]).to("cpu", self.dtype(name)) for name in names}

    def _is_own(self, name: str, tensor: Tensor) -> bool:
        """Whether this rank's part of a saved tensor is that of the parameter; of another stage's, it has none."""
        box = box_of(tensor)
        return self.boxes[name].numel == 0 if box is None else box == self.boxes[name]

    def _checked(self, state: Mapping[str, Tensor]) -> tuple[list[str], bool]:
        """The names, and whether all tensors are whole."""
        for name, tensor in state.items():
            shape = self._specs[name].shape if name in self._specs else None
            if tuple(tensor.shape) != shape:
                raise InvalidTensorsError(
                    f"{name}: the checkpoint has a residual of shape {list(tensor.shape)}, but this model has "
                    f"{'no such parameter' if shape is None else list(shape)}; resume with the same model."
                )
        return list(state), all(as_dtensor(tensor) is None for tensor in state.values())

    @cached_property
    def _everyone(self) -> list[dict[str, Box]]:
        """The boxes of all ranks. Collective, once."""
        everyone: list[dict[str, Box]] = self._world.gather(self.boxes)
        return everyone

    def _others(self, name: str, once: bool) -> Iterator[tuple[int, Box]]:
        """The other ranks with a part; of those with the same part, the first if it counts `once`. Collective, once."""
        seen = {self._everyone[0][name]} if once else set()
        for rank, boxes in enumerate(self._everyone):
            box = boxes[name]
            if rank and box.numel and box not in seen:
                yield rank, box
            if once:
                seen.add(box)

    def _gather(self, name: str, part: Tensor) -> Tensor | None:
        """The whole tensor, on rank 0. Collective."""
        world = self._world
        if world.size == 1:
            return part
        senders = dict(self._others(name, once=True))
        if not world.is_main:
            if world.rank in senders:
                dist.send(part.contiguous(), 0, group=world.control_group)
            return None
        whole = torch.empty(self._specs[name].shape, dtype=part.dtype)
        self.boxes[name].of(whole).copy_(part)
        for rank, box in senders.items():
            room = box.of(whole)
            received = room if room.is_contiguous() else torch.empty(box.sizes, dtype=part.dtype)
            dist.recv(received, rank, group=world.control_group)
            if received is not room:
                room.copy_(received)
        return whole

    def _scatter(self, name: str, whole: Tensor | None) -> Tensor:
        """This rank's part of rank 0's tensor; of None, for ranks that have to receive something, any values.

        Collective.
        """
        world, own = self._world, self.boxes[name]
        if world.size == 1:
            assert whole is not None
            return whole
        receivers = list(self._others(name, once=False))
        if not world.is_main:
            part = torch.empty(own.sizes, dtype=self.dtype(name))
            if own.numel:
                dist.recv(part, 0, group=world.control_group)
            return part
        if whole is None:
            whole = torch.empty(self._specs[name].shape, dtype=self.dtype(name))
        for rank, box in receivers:
            dist.send(box.of(whole).contiguous(), rank, group=world.control_group)
        return box_copy(own, whole)

    def of_ranks(self, row: Tensor) -> Tensor:
        """The rows of all ranks, as a tensor that a checkpoint in shards can hold.

        Args:
            row: of this rank, of the same shape on every rank.
        """
        if self._world.size == 1:
            return row[None]
        mesh, placements = self._by_rank(is_divided=True)
        return _dtensor(row[None], mesh, placements, torch.Size((self._world.size, *row.shape)))

    def _as_shard(self, name: str, part: Tensor) -> Tensor:
        shard, shape = as_dtensor(self._shards[name]), torch.Size(self._specs[name].shape)
        lies = self._by_rank(is_divided=bool(shape)) if shard is None else (shard.device_mesh, shard.placements)
        return _dtensor(part, *lies, shape)

    def _by_rank(self, is_divided: bool) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """How a tensor lies whose rows, if it has any, are divided between all ranks."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import Replicate, Shard  # importing DTensor costs 0.7 s

        group: Any = self._world.control_group or dist.group.WORLD
        return DeviceMesh.from_group(group, "cpu"), (Shard(0) if is_divided else Replicate(),)


def _dtensor(part: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size) -> Tensor:
    """A DTensor with a part on the host, wherever the mesh has its devices, to which `from_local` would move it."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(mesh, placements, TensorMeta(shape, stride, part.dtype))
    made: Tensor = DTensor(part, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return made


def box_copy(box: Box, whole: Tensor) -> Tensor:
    """The elements of a box, in memory of their own."""
    return box.of(whole).clone(memory_format=torch.contiguous_format)


def _own_box(shard: Tensor, world: World) -> Box:
    box = box_of(shard)
    if box is None:
        return Box((0,) * shard.ndim, (0,) * shard.ndim)
    if as_dtensor(shard) is not None or not shard.ndim or world.size == 1:
        return box
    rows = -(-shard.shape[0] // world.size)  # as of torch's Shard(0)
    first = min(world.rank * rows, shard.shape[0])
    return Box((first, *box.offsets[1:]), (min(rows, shard.shape[0] - first), *box.sizes[1:]))
