"""Who is slow, and in what: the times of all ranks compared, and said in one line."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FORWARD_SHARE = 3.0
"""Forward and backward pass take three times what the forward pass takes: the backward pass has twice its products."""


@dataclass(frozen=True)
class RankTimes:
    """What one rank measured, in seconds of one step; readings of its GPU are NaN where there are none."""

    step: float
    data: float
    forward: float
    """The forward passes. No collective stands in them, so they tell the rank's own speed."""
    watts: float = math.nan
    celsius: float = math.nan
    utilization: float = math.nan
    megahertz: float = math.nan

    @property
    def compute(self) -> float:
        """The forward and, by estimate, the backward passes; no more than the step has left for them."""
        return min(FORWARD_SHARE * self.forward, max(0.0, self.step - self.data))

    @property
    def work(self) -> float:
        """What the rank is busy with by itself."""
        return self.data + self.compute

    @property
    def communication(self) -> float:
        """The rest of the step: collectives, the waiting for slower ranks in them, and the update."""
        return max(0.0, self.step - self.work)


@dataclass(frozen=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    cause: str
    """data | compute: where it spends more than the median rank."""
    speed: float
    """Share of the median rank's speed."""
    seconds: float
    """What it spends there in a step."""
    usual_seconds: float
    """What the median rank spends there."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow in {self.cause}: {self.seconds * 1000:.1f} ms a step there, the median rank "
            f"{self.usual_seconds * 1000:.1f} ms; it has {self.speed:.0%} of that rank's speed"
        )


def find_stragglers(times: Sequence[RankTimes], threshold: float) -> list[Straggler]:
    """The ranks whose own work takes so long that their speed is below `threshold` of the median rank's, slowest first.

    A rank that waits for others in a collective is not slow: only data and computation count. Of an even number of
    ranks the faster of the two middle ones is the median.
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
    """One line of the least and largest of all ranks; `step_flops` are the model FLOPs of a step over all ranks."""
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
    """The `count` slowest and fastest ranks by their own work, where more than one is asked for."""
    if count <= 1:
        return []
    order = sorted(range(len(times)), key=lambda rank: times[rank].work)
    shown = {"slowest": order[::-1][:count], "fastest": order[:count]}
    return [
        f"{name} ranks (ms of own work): " + ", ".join(f"{rank}: {times[rank].work * 1000:.2f}" for rank in ranks)
        for name, ranks in shown.items()
    ]
