"""Copies tensors into buffers that are reused across saves, so that training continues while they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 64
"""Alignment of each copy in bytes; suits every dtype and the processor's cache lines."""


class WarmBuffers:
    """Host memory that grows to the size of the largest state and is reused.

    Fresh memory incurs a page fault every few kilobytes, which costs several times the copy itself; reused memory pays
    this once. Tensors on a GPU are copied asynchronously into page-locked memory.
    """

    def __init__(self) -> None:
        self.release()

    @property
    def size_bytes(self) -> int:
        """Bytes of memory held."""
        return self._plain.size_bytes + self._pinned.size_bytes

    def copy(self, tensors: Sequence[Tensor]) -> Snapshot:
        """Copy the values as of this point in each device's stream; overwrites the previous copy.

        Later in-place changes to the tensors on the same stream do not affect the copies.
        """
        on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
        on_host = [tensor for tensor in tensors if not tensor.is_cuda]
        host_copies, gpu_copies = iter(self._plain.copy(on_host)), iter(self._pinned.copy(on_gpu))
        copies = [next(gpu_copies if tensor.is_cuda else host_copies) for tensor in tensors]
        events = []
        for device in {tensor.device for tensor in on_gpu}:
            with torch.cuda.device(device):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                events.append(event)
        return Snapshot(copies, events)

    def release(self) -> None:
        """Free the memory."""
        self._plain = _Arena(is_pinned=False)
        self._pinned = _Arena(is_pinned=True)


@dataclass(frozen=True)
class Snapshot:
    """Copies whose transfer from a GPU may still be in flight."""

    copies: list[Tensor]
    events: list[torch.cuda.Event]

    def wait(self) -> list[Tensor]:
        """Wait for the copies and return them in the order of the tensors; may be called from another thread."""
        for event in self.events:
            event.synchronize()
        return self.copies


class _Arena:
    """One block of memory divided among the tensors of a state; the division is reused for the same shapes."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._places: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        return self._memory.numel()

    def copy(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            self._places = self._divided(tensors)
            self._kinds = kinds
        for place, tensor in zip(self._places, tensors, strict=True):
            place.copy_(tensor.detach(), non_blocking=self._is_pinned)
        return self._places

    def _divided(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        needed = sum(sizes)
        if needed > self._memory.numel():
            self._memory, self._places = self._memory[:0], []  # free the old memory before allocating the new
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=self._is_pinned)
        places, start = [], 0
        for tensor, size in zip(tensors, sizes, strict=True):
            part = self._memory[start : start + tensor.nbytes]
            places.append(part.view(tensor.dtype).view(tensor.shape))
            start += size
        return places
