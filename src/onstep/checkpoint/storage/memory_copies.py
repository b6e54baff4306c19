"""Copies tensors into buffers that are reused across saves, so that training continues while they are written."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onstep.checkpoint.storage.copy_lanes import Copy, CopyEvent, CopyLane, lane_of
from onstep.checkpoint.storage.host_blocks import BLOCK_BYTES, CudaPageLock, HostBlocks, PageLock


class WarmBuffers:
    """Host memory that grows to the size of the largest state and is reused.

    Fresh memory incurs a page fault every few kilobytes, which costs several times the copy itself; reused memory pays
    this once. Tensors on a GPU are copied asynchronously into page-locked memory: those that are known not to change
    for a while on a stream of their own.

    Args:
        lane_of: the lane of a device; None for one whose tensors are copied at once.
        page_lock: locks the memory for devices with a lane.
        block_bytes: see `HostBlocks`.
    """

    def __init__(
        self,
        lane_of: Callable[[torch.device], CopyLane | None] = lane_of,
        page_lock: PageLock | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._lane_of = lane_of
        self._lanes: dict[torch.device, CopyLane | None] = {}
        self._plain = HostBlocks(block_bytes=block_bytes)
        self._locked = HostBlocks(page_lock or CudaPageLock(), block_bytes)
        self._beside: list[tuple[CopyLane, CopyEvent, Sequence[Copy]]] = []
        """Copies that nothing has been held back for; their tensors must stay alive."""

    @property
    def size_bytes(self) -> int:
        """Bytes of memory held."""
        return self._plain.size_bytes + self._locked.size_bytes

    def copies_beside(self, device: torch.device) -> bool:
        """Whether copies of that device's tensors can be beside its own work."""
        return self._lane(device) is not None

    def copy(self, tensors: Sequence[Tensor], steady: Collection[int] = ()) -> Snapshot:
        """Copy the values as of this point in each device's stream; overwrites the previous copy.

        Later in-place changes to the tensors on the same stream do not affect the copies, if `hold_back` is called
        before those to tensors that are `steady`.

        Args:
            steady: addresses of storages on devices that nothing changes until then, see `storage_of`.
        """
        self.hold_back()
        lanes = [self._lane(tensor.device) for tensor in tensors]
        plain = iter(self._plain.places([tensor for tensor, lane in zip(tensors, lanes, strict=True) if lane is None]))
        locked = iter(self._locked.places([tensor for tensor, lane in zip(tensors, lanes, strict=True) if lane]))
        in_order, beside = dict[CopyLane, list[Copy]](), dict[CopyLane, list[Copy]]()
        places = []
        for tensor, lane in zip(tensors, lanes, strict=True):
            place = next(plain if lane is None else locked)
            places.append(place)
            if lane is None:
                place.copy_(tensor.detach())
            else:
                group = beside if storage_of(tensor) in steady else in_order
                group.setdefault(lane, []).append((place, tensor.detach()))
        events = [lane.copy_in_order(copies) for lane, copies in in_order.items()]
        self._beside = [(lane, lane.copy_beside(copies), copies) for lane, copies in beside.items()]
        return Snapshot(places, [*events, *(event for _, event, _ in self._beside)])

    def hold_back(self) -> None:
        """Make what is queued from now on wait for the copies of steady tensors, which it may change; not the host."""
        for lane, event, _ in self._beside:
            lane.hold_back(event)
        self._beside = []

    def release(self) -> None:
        """Free the memory."""
        self.hold_back()
        self._plain.release()
        self._locked.release()

    def _lane(self, device: torch.device) -> CopyLane | None:
        if device not in self._lanes:
            self._lanes[device] = self._lane_of(device)
        return self._lanes[device]


def storage_of(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 if it has none."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return int(local.untyped_storage().data_ptr()) if local.layout is torch.strided else 0


@dataclass(frozen=True)
class Snapshot:
    """Copies whose transfer from a GPU may still be in flight."""

    copies: list[Tensor]
    events: list[CopyEvent]

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return them in the order of the tensors; may be called from another thread."""
        for event in self.events:
            event.synchronize()
        return self.copies
