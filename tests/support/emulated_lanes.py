"""Emulates a GPU's streams and page-locked memory on the CPU: copies beside the work are made as late as is allowed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from onstep.checkpoint.storage.copy_lanes import Copy, CopyEvent

LONGEST_SECONDS = 10.0
"""How long a writer waits for an event that nothing was held back for; then it gets what is there."""


class LateEvent:
    """Copies that are made when the work is held back for them, or else when somebody has waited for too long."""

    def __init__(self, copies: Sequence[Copy]) -> None:
        self._copies = copies
        self._done = threading.Event()

    def complete(self) -> None:
        for place, tensor in self._copies:
            place.copy_(tensor)
        self._done.set()

    def synchronize(self) -> None:
        if not self._done.wait(LONGEST_SECONDS):
            self.complete()


class LateLane:
    """Notes the calls in order."""

    def __init__(self, device: torch.device) -> None:
        self.calls: list[str] = []

    def copy_in_order(self, copies: Sequence[Copy]) -> CopyEvent:
        self.calls.append(f"in order: {len(copies)}")
        event = LateEvent(copies)
        event.complete()
        return event

    def copy_beside(self, copies: Sequence[Copy]) -> CopyEvent:
        self.calls.append(f"beside: {len(copies)}")
        return LateEvent(copies)

    def hold_back(self, event: CopyEvent) -> None:
        assert isinstance(event, LateEvent)
        self.calls.append("hold back")
        event.complete()


class CountingLock:
    """Counts the bytes that are locked, by block."""

    def __init__(self, refuses: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.most_bytes = 0
        self.refuses = refuses

    @property
    def num_bytes(self) -> int:
        return sum(self.locked.values())

    def lock(self, memory: Tensor) -> bool:
        if self.refuses:
            return False
        assert memory.data_ptr() not in self.locked
        self.locked[memory.data_ptr()] = memory.nbytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)
        return True

    def unlock(self, memory: Tensor) -> None:
        assert self.locked.pop(memory.data_ptr()) == memory.nbytes
