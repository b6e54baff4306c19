"""Allocates all parameters of a fragment at once, keeps large blocks for the next round, and gives small ones back.

Submissions and versions are in files that have no name, mapped into memory: what nobody reads now need not be in
memory, and the system can take it away. One large block goes back as soon as nobody reads it. Many small ones stay with
the process as holes between others that are in use, which can be as large as the model.
"""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from onstep.diloco.codec.specs import master_dtype
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.errors import warn_once

logger: logging.Logger = logging.getLogger(__name__)

_LIBC = ctypes.CDLL(None)
_ALIGNMENT = 64
_LEAST_KEPT = 1 << 20
Block = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Buffers:
    """Memory for submissions and versions, which have the same sizes in each round.

    Memory that is new to a process has to be found and zeroed by the system, page by page, which lasts longer than the
    network needs to fill it. So what was used is kept, but never more than was in use at the same time. Safe to use
    from several threads.

    Args:
        spool: the directory of the files that large blocks are mapped from; None for memory without a file.
    """

    def __init__(self, spool: Path | None = None) -> None:
        self._spool = spool if sys.platform == "linux" else None
        self._mapped: dict[int, int] = {}
        """The first address of each block that is mapped from a file, and the one after its last."""
        self._free: list[Block] = []
        """Least recently used first."""
        self._used = self._most_used = 0
        self._lock = threading.RLock()  # what is collected while it is held comes back in the same thread

    @property
    def free_bytes(self) -> int:
        """Of the memory that is kept, and not in use."""
        return sum(one.nbytes for one in self._free)

    def take(self, size: int) -> Block:
        """So many bytes, of undefined values; they are free again when nothing refers to them."""
        if size < _LEAST_KEPT:
            return np.empty(size, np.uint8)
        with self._lock:
            block = self._found(size)
            if block is None:
                block = self._new(size)
            self._used += block.nbytes
            self._most_used = max(self._most_used, self._used)
        lent = block[:size]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent

    def release(self, tensor: Tensor) -> None:
        """Let the system take away the memory of a tensor that is mapped from a file, until it is read again."""
        self.release_range(tensor.data_ptr(), tensor.nbytes)

    def release_range(self, start: int, size: int) -> None:
        """The same for a range of addresses; without effect for memory that no file has."""
        end = start + size
        for first, after in list(self._mapped.items()):
            if first <= start and end <= after:
                begin, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
                if begin < stop:
                    _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(stop - begin), mmap.MADV_DONTNEED)
                return

    def _new(self, size: int) -> Block:
        if self._spool is not None:
            try:
                with tempfile.TemporaryFile(dir=self._spool) as file:
                    os.posix_fallocate(file.fileno(), 0, size)  # a full disk is an error now, not a signal later
                    block = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
            except OSError as error:
                warn_once(logger, f"{self._spool} has no room for submissions ({error.strerror}): they stay in memory")
            else:
                start = int(block.__array_interface__["data"][0])
                self._mapped[start] = start + size
                weakref.finalize(block, self._mapped.pop, start, None).atexit = False
                return block
        return np.empty(size, np.uint8)  # which asks for huge pages, so that touching it costs little

    def _found(self, size: int) -> Block | None:
        """The smallest of the free blocks that fit; without one, room is made."""
        fitting = [one for one in self._free if size <= one.nbytes <= size + size // 8]
        if fitting:
            smallest = min(fitting, key=lambda one: one.nbytes)
            self._free = [one for one in self._free if one is not smallest]
            return smallest
        while self._free and self.free_bytes + self._used + size > self._most_used:
            del self._free[0]
        return None

    def _give_back(self, block: Block) -> None:
        with self._lock:
            self._used -= block.nbytes
            self._free.append(block)


def allocate(specs: Sequence[ParameterSpec], buffers: Buffers) -> dict[str, Tensor]:
    """Tensors by name, in float32 or float64, in one block of memory; their values are not defined."""
    block = torch.from_numpy(buffers.take(sum(map(_padded_bytes, specs))))
    parameters: dict[str, Tensor] = {}
    position = 0
    for spec in specs:
        one = block[position : position + _bytes(spec)]
        parameters[spec.name] = one.view(master_dtype(spec.dtype)).view(spec.shape)
        position += _padded_bytes(spec)
    return parameters


def release_holes() -> None:
    """Give memory that was freed, but is still with the process, back to the system; where the C library can."""
    if sys.platform == "linux":
        trim = getattr(_LIBC, "malloc_trim", None)  # of glibc; musl has none, and no holes of this kind
        if trim is not None:
            trim(0)


def _bytes(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * master_dtype(spec.dtype).itemsize


def _padded_bytes(spec: ParameterSpec) -> int:
    return -(-_bytes(spec) // _ALIGNMENT) * _ALIGNMENT
