"""Orders the copies of a save with a device's own work: on its current stream, or beside it on another one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

Copy = tuple[Tensor, Tensor]
"""`(host memory, tensor on the device)`"""


class CopyEvent(Protocol):
    """A point in the work of a device."""

    def synchronize(self) -> None:
        """Wait until the device has reached it; may be called from another thread."""
        ...


class CopyLane(Protocol):
    """The copies from one device to host memory."""

    def copy_in_order(self, copies: Sequence[Copy]) -> CopyEvent:
        """Copy on the device's current stream: what is queued there later sees or changes nothing of it."""
        ...

    def copy_beside(self, copies: Sequence[Copy]) -> CopyEvent:
        """Copy what the current stream has computed so far, beside what is queued there later."""
        ...

    def hold_back(self, event: CopyEvent) -> None:
        """Make whatever is queued later on the current stream wait for the event; the host does not wait."""
        ...


class CudaLane:
    """The copies from a GPU, those beside its work on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copy_in_order(self, copies: Sequence[Copy]) -> CopyEvent:
        return self._copy(copies, torch.cuda.current_stream(self._device))

    def copy_beside(self, copies: Sequence[Copy]) -> CopyEvent:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return self._copy(copies, self._stream)

    def hold_back(self, event: CopyEvent) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def _copy(self, copies: Sequence[Copy], stream: torch.cuda.Stream) -> torch.cuda.Event:
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for place, tensor in copies:
                place.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event


def lane_of(device: torch.device) -> CopyLane | None:
    """The lane of a GPU; None for a device whose tensors are copied at once."""
    return CudaLane(device) if device.type == "cuda" else None
