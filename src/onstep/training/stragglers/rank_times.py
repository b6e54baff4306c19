"""Compares the times of all ranks, finds slow ranks and their cause, and formats the report line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FORWARD_SHARE = 3.0
"""Forward and backward pass together cost three times the forward pass: the backward pass has twice its products."""


@dataclass(frozen=True)
class RankTimes:
    """One rank's measurements, in seconds per step; GPU readings are NaN if not available."""

    step: float
    data: float
    forward: float
    """The forward passes. They contain no collective, so they show the rank's own speed."""
    watts: float = math.nan
    celsius: float = math.nan
    utilization: float = math.nan
    megahertz: float = math.nan

    @property
    def compute(self) -> float:
        """The forward passes and an estimate of the backward passes, at most the rest of the step."""
        return min(FORWARD_SHARE * self.forward, max(0.0, self.step - self.data))

    @property
    def work(self) -> float:
        """The rank's own work."""
        return self.data + self.compute

    @property
    def communication(self) -> float:
        """The rest of the step: collectives, including the wait for slower ranks, and the update."""
        return max(0.0, self.step - self.work)


@dataclass(frozen=True)
class Straggler:
    """A rank that slows the others down."""

    rank: int
    cause: str
    """data | compute: where it spends more time than the median rank."""
    speed: float
    """Fraction of the median rank's speed."""
    seconds: float
    """The time that it spends there per step."""
    usual_seconds: float
    """The time that the median rank spends there."""

    def __str__(self) -> str:
        return self.described(f"rank {self.rank}")

    def described(self, place: str) -> str:
        """The finding in a sentence; `place` is the rank with its coordinates."""
        return (
            f"{place} is slow in {self.cause}: {self.seconds * 1000:.1f} ms per step, the median rank "
            f"{self.usual_seconds * 1000:.1f} ms; it runs at {self.speed:.0%} of that rank's speed"
        )


def find_stragglers(times: Sequence[RankTimes], threshold: float) -> list[Straggler]:
    """The ranks whose own work is so slow that their speed is below `threshold` of the median rank's, slowest first.

    A rank that waits for others in a collective is not slow: only data and computation count. With an even number of
    ranks, the median is the faster of the two middle ones.
    """
    usual = {part: statistics.median_low(getattr(one, part) for one in times) for part in ("data", "compute", "work")}
    found = []
    for rank, one in enumerate(times):
        if one.work <= 0 or usual["work"] >= threshold * one.work:
            continue
        cause = max(("data", "compute"), key=lambda part: getattr(one, part) - usual[part])
        found.append(Straggler(rank, cause, usual["work"] / one.work, getattr(one, cause), usual[cause]))
    return sorted(found, key=lambda one: one.speed)


def straggler_line(times: Sequence[RankTimes], step_flops: float) -> str:
    """One line with the minima and maxima over all ranks; `step_flops` are a step's model FLOPs over all ranks."""
    teraflops = step_flops / len(times) / 1e12
    columns = {
        "step (ms)": [one.step * 1000 for one in times],
        "data (ms)": [one.data * 1000 for one in times],
        "compute (ms)": [one.compute * 1000 for one in times],
        "communication (ms)": [one.communication * 1000 for one in times],
        "TFLOP/s": [teraflops / one.compute if teraflops > 0 and one.compute > 0 else math.nan for one in times],
        "power (W)": [one.watts for one in times],
        "temperature (C)": [one.celsius for one in times],
        "utilization (%)": [one.utilization for one in times],
        "clock (MHz)": [one.megahertz for one in times],
    }
    fields = []
    for name, values in columns.items():
        known = [(one, rank) for rank, one in enumerate(values) if not math.isnan(one)]
        if known:
            least, largest = min(known), max(known, key=lambda pair: (pair[0], -pair[1]))
            fields.append(f"{name} min {least[0]:.2f} (rank {least[1]}) max {largest[0]:.2f} (rank {largest[1]})")
    return "straggler report | " + " | ".join(fields)


def ranking_lines(times: Sequence[RankTimes], count: int) -> list[str]:
    """The `count` slowest and fastest ranks by their own work, if more than one is requested."""
    if count <= 1:
        return []
    order = sorted(range(len(times)), key=lambda rank: times[rank].work)
    shown = {"slowest": order[::-1][:count], "fastest": order[:count]}
    return [
        f"{name} ranks (ms of own work): " + ", ".join(f"{rank}: {times[rank].work * 1000:.2f}" for rank in ranks)
        for name, ranks in shown.items()
    ]
