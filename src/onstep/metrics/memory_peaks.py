"""Peaks of CUDA's allocator: of each logging interval, and of the whole run, although the counter has one reset."""

from __future__ import annotations

from collections.abc import Mapping

import torch

ALLOCATED = "allocated_bytes.all.peak"
"""The statistic of `torch.cuda.memory_stats()` that `torch.cuda.max_memory_allocated()` returns."""


class MemoryPeaks:
    """The peaks of a run on this process's GPU. It keeps the largest of each statistic before it resets the counter."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}

    def end_interval(self, device: torch.device) -> int | None:
        """The most bytes allocated since the last call; the next interval begins. None on a device without CUDA."""
        if not is_counted(device):
            return None
        statistics = torch.cuda.memory_stats(device)
        self._kept |= {key: self.of_run(key, value) for key, value in statistics.items() if key.endswith(".peak")}
        torch.cuda.reset_peak_memory_stats(device)
        return int(statistics.get(ALLOCATED, 0))

    def of_run(self, statistic: str, current: int) -> int:
        """The largest value of a statistic in this run, given its current one; others than peaks are unchanged."""
        return max(current, self._kept.get(statistic, current))

    def over_run(self, statistics: Mapping[str, int]) -> dict[str, int]:
        """The statistics of the allocator with the peaks of the run in place of those of the interval."""
        return {key: self.of_run(key, value) for key, value in statistics.items()}


def is_counted(device: torch.device) -> bool:
    """Whether torch counts the peaks of this device."""
    return device.type == "cuda"
