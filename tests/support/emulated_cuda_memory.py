"""An emulation of the counters of CUDA's allocator: what is allocated now, and the peak since the last reset."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from onstep.metrics import memory_peaks

FAMILIES = ("allocated_bytes", "active_bytes", "reserved_bytes")


class EmulatedCudaMemory:
    """Replaces the counters of `torch.cuda` for a run on the CPU, whose device then counts as one that has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.peak = 1000
        for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(memory_peaks, "is_counted", lambda device: True)

    def spike(self, size: int) -> None:
        """Allocate bytes and free them at once."""
        self.peak = max(self.peak, self.current + size)

    def allocate(self, size: int) -> None:
        """Allocate bytes that stay."""
        self.spike(size)
        self.current += size

    def memory_stats(self, device: object = None) -> dict[str, int]:
        peaks = {f"{family}.all.peak": self.peak for family in FAMILIES}
        return {f"{family}.all.current": self.current for family in FAMILIES} | peaks | {"num_alloc_retries": 2}

    def memory_allocated(self, device: object = None) -> int:
        return self.current

    def max_memory_allocated(self, device: object = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.peak = self.current

    def module(self) -> SimpleNamespace:
        """In place of the module `torch` where nothing but these counters is used."""
        counters = {name: getattr(self, name) for name in ("memory_allocated", "max_memory_allocated")}
        cuda = SimpleNamespace(
            is_available=lambda: True,
            empty_cache=lambda: None,
            reset_peak_memory_stats=self.reset_peak_memory_stats,
            **counters,
        )
        return SimpleNamespace(cuda=cuda)
