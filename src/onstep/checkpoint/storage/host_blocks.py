"""Host memory in blocks, divided among tensors; page-locked on request, and returned to the system when unused."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from onstep.errors import warn_once

logger = logging.getLogger(__name__)

ALIGNMENT = 64
"""Alignment of each tensor in bytes; suits every dtype and the processor's cache lines."""

BLOCK_BYTES = 2**30
"""Size of a block, at most; a larger tensor has a block of its own."""


class PageLock(Protocol):
    """Locks the pages of host memory, so that a device can write to it while the host continues."""

    def lock(self, memory: Tensor) -> bool:
        """Lock whole pages; False if the system refuses."""
        ...

    def unlock(self, memory: Tensor) -> None: ...


class CudaPageLock:
    """Registers plain memory with CUDA.

    Unlike `pin_memory`, which rounds to a power of two and keeps what it has for the rest of the process, this costs
    the bytes that are asked for, as long as they are used.
    """

    def lock(self, memory: Tensor) -> bool:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)) == 0:  # 1: for all devices
            return True
        with suppress(RuntimeError):  # clears CUDA's last error, which the next kernel would report as its own
            torch.zeros((), device="cuda")
        warn_once(
            logger, "the memory of a save could not be page-locked, so that its copies are slower: raise `ulimit -l`"
        )
        return False

    def unlock(self, memory: Tensor) -> None:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


class _Block:
    """Memory of which a part is used."""

    def __init__(self, size: int, page_lock: PageLock | None) -> None:
        if page_lock is None or not size:
            self.memory, self._lock = torch.empty(size, dtype=torch.uint8), None
        else:  # whole pages of its own: two locks of one page are an error
            whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            memory = torch.empty(whole + mmap.PAGESIZE, dtype=torch.uint8)
            start = -memory.data_ptr() % mmap.PAGESIZE
            self.memory = memory[start : start + whole]
            self._lock = page_lock if page_lock.lock(self.memory) else None
        self.used = 0

    def free(self) -> None:
        """Unlock the pages; the memory is freed with the last tensor in it."""
        if self._lock is not None:
            self._lock.unlock(self.memory)

    def has_room(self, size: int) -> bool:
        return self.used + size <= self.memory.nbytes

    def place(self, tensor: Tensor, size: int) -> Tensor:
        """The next `size` bytes, as a tensor like the given one."""
        start, self.used = self.used, self.used + size
        return self.memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


class HostBlocks:
    """Memory for the tensors of a state, in blocks of at most `block_bytes`; the division is kept for the same shapes.

    A new block is as large as what is in it. When the tensors change, blocks into which some of them fit are kept; the
    others are freed before new ones are allocated.

    Args:
        page_lock: locks the pages; None for plain memory.
    """

    def __init__(self, page_lock: PageLock | None = None, block_bytes: int = BLOCK_BYTES) -> None:
        self._page_lock, self._block_bytes = page_lock, block_bytes
        self._blocks: list[_Block] = []
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []
        self._places: list[Tensor] = []

    @property
    def size_bytes(self) -> int:
        """Bytes of memory held."""
        return sum(block.memory.nbytes for block in self._blocks)

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """A tensor in this memory for each of `tensors`, with its dtype and shape."""
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if kinds != self._kinds:
            self._places, self._kinds = [], []
            self._places, self._kinds = self._divided(tensors), kinds
        return self._places

    def release(self) -> None:
        """Free the memory."""
        self._places, self._kinds = [], []
        self._keep([])

    def _divided(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Large tensors come first, so that small ones of changing sizes move no others."""
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        places, rest = dict[int, Tensor](), list[int]()
        for block in self._blocks:
            block.used = 0
        for index in sorted(range(len(tensors)), key=lambda index: -sizes[index]):
            known = next((block for block in self._blocks if block.has_room(sizes[index])), None)
            if known is None:
                rest.append(index)
            else:
                places[index] = known.place(tensors[index], sizes[index])
        self._keep([block for block in self._blocks if block.used])
        while rest:
            total, inside, outside = 0, list[int](), list[int]()
            for index in rest:
                fits = not inside or total + sizes[index] <= self._block_bytes
                total += sizes[index] * fits
                (inside if fits else outside).append(index)
            block = _Block(total, self._page_lock)
            self._blocks.append(block)
            places.update((index, block.place(tensors[index], sizes[index])) for index in inside)
            rest = outside
        return [places[index] for index in range(len(tensors))]

    def _keep(self, blocks: list[_Block]) -> None:
        """Free all other blocks."""
        for block in self._blocks:
            if block not in blocks:
                block.free()
        self._blocks = blocks
