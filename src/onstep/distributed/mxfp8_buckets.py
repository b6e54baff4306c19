"""Buckets whose parameters are gathered in MXFP8, from float32 rows that each rank keeps beside the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from onstep.distributed.buckets import ALL_GATHER, Bucket, Member, Ranks, wait
from onstep.distributed.mxfp8 import BLOCK, MXFP8, quantize
from onstep.distributed.shards import as_dtensor, held_parts


class MXFP8Bucket(Bucket):
    """A bucket whose parameters hold what is left of numbers in MXFP8; their masters are on the rank that updates them.

    Matrices, and tensors of more dimensions, are sent in 33 bytes for 32 numbers of a row, others in their own type.
    Blocks begin with a row, so that the numbers do not depend on how many ranks divide the rows.

    Args:
        named: the parameters, with their names; each becomes a view.
        values: flat, with the room of `room` for each parameter.
        gradients: as long.
        ranks: the ranks that divide the rows.
        summed_in: the type in which gradients are summed; None is their own.
        shares: whether what is gathered arrives in the memory of the gradients, which is then cleared.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        values: Tensor,
        gradients: Tensor,
        ranks: Ranks,
        summed_in: torch.dtype | None = None,
        *,
        shares: bool = False,
    ) -> None:
        super().__init__(named, values, gradients, ranks, summed_in)
        self.members = [_with_master(one) for one in self.members]
        self._rows = [_Rows(one) for one in self.members]
        self._lengths = [
            form.num_bytes(size // (form.columns or 1)) for form, size in zip(self._rows, self._sizes, strict=True)
        ]
        """The bytes of a rank, of each parameter."""
        self._flat_gradients, self._shares = gradients, shares
        self._versions: list[int] = []
        self.take_values()

    @property
    def holds_gather(self) -> bool:
        """Whether the memory of the gradients is where something arrives."""
        return self._shares and self._gathering is not None

    def clear_gradients(self) -> None:
        """Set the gradients to zero, unless the end of a gather will."""
        if not self.holds_gather:
            self._flat_gradients.zero_()

    @torch.no_grad()
    def take_values(self) -> None:
        """Let the values of the parameters be the masters, and round the values. Not collective."""
        self._versions = [-1] * len(self.members)
        self.take_written()

    @torch.no_grad()
    def take_written(self) -> None:
        """The same for the parameters that something has written to in place since they were last gathered."""
        for number, (member, version) in enumerate(zip(self.members, self._versions, strict=True)):
            if member.parameter._version == version:
                continue
            form, values = self._rows[number], self._values[number]
            [master] = held_parts([member.shard])
            start = self._sizes[number] * self.ranks.rank
            master.view(-1).copy_(values[start : start + master.numel()])
            values.copy_(form.unpacked(form.packed(values)))
            self._versions[number] = member.parameter._version

    @torch.no_grad()
    def start_gather(self) -> None:
        """Begin to gather the masters of all ranks as bytes, unless that has begun. Collective."""
        if self._gathering is not None or self.is_current:
            return
        length, rank = sum(self._lengths), self.ranks.rank
        if self._shares:
            filled = self._flat_gradients.view(torch.uint8)[: self.ranks.size * length]
        else:
            filled = torch.empty(self.ranks.size * length, dtype=torch.uint8, device=self.device)
        own = filled[rank * length : (rank + 1) * length]
        masters = held_parts([member.shard for member in self.members])
        for form, master, place in zip(self._rows, masters, torch.split(own, self._lengths), strict=True):
            packed = form.packed(master.view(-1))
            place[: len(packed)].copy_(packed)
            place[len(packed) :].zero_()
        work = getattr(dist, ALL_GATHER)(filled, own, group=self.ranks.gathering, async_op=True)
        self._gathering, self.is_current = (work, filled), True

    @torch.no_grad()
    def finish_gather(self) -> None:
        """Wait for a gather that has begun, and clear the memory in which it arrived if gradients share it."""
        if self._gathering is None:
            return
        work, filled = self._gathering
        wait(work)
        parts = torch.split(filled.view(self.ranks.size, -1), self._lengths, dim=1)
        for form, part, values in zip(self._rows, parts, self._values, strict=True):
            values.copy_(form.unpacked(part.flatten()))
        self._gathering = None
        if self._shares:
            self._flat_gradients.zero_()


class _Rows:
    """How rows of a parameter are sent."""

    def __init__(self, member: Member) -> None:
        self.columns = math.prod(member.parameter.shape[1:])
        self._dtype = member.parameter.dtype
        self._is_quantized = member.parameter.ndim > 1 and self.columns > 0
        self._blocks = -(-self.columns // BLOCK)

    def num_bytes(self, rows: int) -> int:
        """The bytes of some rows."""
        return rows * (self.columns + self._blocks if self._is_quantized else self.columns * self._dtype.itemsize)

    def packed(self, rows: Tensor) -> Tensor:
        """Bytes of whole rows, flat."""
        if not self._is_quantized:
            return rows.view(torch.uint8)
        padded = nn.functional.pad(rows.view(-1, self.columns), (0, self._blocks * BLOCK - self.columns))
        found = quantize(padded)
        elements = found.elements.view(torch.uint8).view(-1, self._blocks * BLOCK)[:, : self.columns]
        return torch.cat([elements, found.scales.view(torch.uint8).view(-1, self._blocks)], dim=1).flatten()

    def unpacked(self, sent: Tensor) -> Tensor:
        """The numbers of such bytes, flat."""
        if not self._is_quantized:
            return sent.clone().view(self._dtype)  # at an address that its type allows
        lengths = [self.columns, self._blocks]
        elements, scales = torch.split(sent.view(-1, sum(lengths)), lengths, dim=1)
        padded = nn.functional.pad(elements, (0, self._blocks * BLOCK - self.columns)).view(-1, BLOCK)
        found = MXFP8(
            padded.view(torch.float8_e4m3fn),
            scales.flatten().view(torch.float8_e8m0fnu),
            torch.Size((len(elements), self._blocks * BLOCK)),
        )
        return found.dequantize(self._dtype)[:, : self.columns].flatten()


@torch.no_grad()
def _with_master(member: Member) -> Member:
    """The same, whose shard has memory of its own."""
    from torch.distributed.tensor import DTensor  # importing DTensor costs 0.7 s

    shard = as_dtensor(member.shard)
    assert shard is not None, "a bucket makes shards"
    master = DTensor.from_local(
        shard.to_local().clone(),
        shard.device_mesh,
        shard.placements,
        run_check=False,
        shape=shard.shape,
        stride=shard.stride(),
    )
    own = nn.Parameter(master)
    own.model_parameter, member.parameter.updated_shard = member.parameter, own  # type: ignore[attr-defined]
    return replace(member, shard=own)
