"""Reads the passes of a pipeline from recorded traces of its ranks, and tells how much of a step its ranks are idle."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, cast

from onstep.config.pipelines import PASS_NAME, Part
from onstep.errors import DataError

_MARKS = ("gpu_user_annotation", "user_annotation")
"""Categories of what a profiler marks by name: the time of a GPU if it has been recorded, else that of the host."""


@dataclass(frozen=True)
class Pass:
    """A pass of a micro-batch through a stage."""

    part: Part
    micro_batch: int
    stage: int
    begin: float
    """Seconds, on the clock of the trace."""
    end: float


@dataclass(frozen=True)
class PipelineStep:
    """The passes of one training step."""

    ranks: list[list[Pass]]
    """Of each rank of the pipeline, in their order; the ranks in the order of their first stages."""

    @property
    def begin(self) -> float:
        """When the first pass begins."""
        return min(one.begin for one in chain(*self.ranks))

    @property
    def seconds(self) -> float:
        """From the begin of the first pass to the end of the last one."""
        return max(one.end for one in chain(*self.ranks)) - self.begin

    @property
    def busy(self) -> list[float]:
        """Seconds of the passes of each rank."""
        return [sum(one.end - one.begin for one in passes) for passes in self.ranks]

    @property
    def idle(self) -> float:
        """The time without a pass beside the time of the passes, over all ranks: (p - 1) / m for `1F1B` in theory."""
        return self.seconds * len(self.ranks) / sum(self.busy) - 1

    def in_order(self) -> PipelineStep:
        """The step as it would be if nothing but the order made a pass wait: each lasts as the median of its stage's
        passes of its part, and sending lasts no time.

        Raises:
            DataError: for a step of which passes are missing.
        """
        number = 1 + max(one.stage for one in chain(*self.ranks))
        lasts = _medians(chain(*self.ranks))
        ends: dict[tuple[str, int, int], float] = {}
        done: list[list[Pass]] = [[] for _ in self.ranks]
        left = [list(reversed(passes)) for passes in self.ranks]
        while any(left):
            has_moved = [_follows(of_rank, left[rank], lasts, ends, number) for rank, of_rank in enumerate(done)]
            if not any(has_moved):
                missing = next(passes[-1] for passes in left if passes)
                raise DataError(
                    f"what {missing.part} {missing.micro_batch} of stage {missing.stage} follows is missing."
                )
        return PipelineStep(done)


def _follows(
    done: list[Pass],
    left: list[Pass],
    lasts: dict[tuple[str, int], float],
    ends: dict[tuple[str, int, int], float],
    num_stages: int,
) -> bool:
    """Let a rank do its next pass if what that depends on is done; whether it did."""
    if not left:
        return False
    one = left[-1]
    needed = _needed(one, num_stages)
    if needed is not None and needed not in ends:
        return False
    begin = max(done[-1].end if done else 0.0, ends[needed] if needed is not None else 0.0)
    end = begin + lasts[one.part, one.stage]
    ends[_direction(one.part), one.micro_batch, one.stage] = end
    done.append(Pass(one.part, one.micro_batch, one.stage, begin, end))
    left.pop()
    return True


def _direction(part: Part) -> str:
    return "backward" if part == "input gradient" else part


def _needed(one: Pass, num_stages: int) -> tuple[str, int, int] | None:
    """Which pass must be done before: its direction, micro-batch and stage."""
    if one.part == "forward":
        return None if one.stage == 0 else ("forward", one.micro_batch, one.stage - 1)
    if one.part == "weight gradient":
        return ("backward", one.micro_batch, one.stage)
    is_last = one.stage == num_stages - 1
    return ("forward", one.micro_batch, one.stage) if is_last else ("backward", one.micro_batch, one.stage + 1)


def _medians(passes: Any) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[float]] = {}
    for one in passes:
        found.setdefault((one.part, one.stage), []).append(one.end - one.begin)
    return {kind: statistics.median(seconds) for kind, seconds in found.items()}


def read_steps(paths: Sequence[str | Path]) -> list[PipelineStep]:
    """The training steps that the traces of all ranks of one pipeline have, in their order.

    Traces are those of torch's profiler: of `ProfilerCallback`, `profiling.use_pytorch_profiler` on all ranks or
    `onstep control profile`. Ranks on several machines are compared by the clocks of these.

    Args:
        paths: a trace of each rank of one pipeline, or a directory with nothing else.

    Raises:
        DataError: for traces without passes, or not of all ranks of one pipeline.
    """
    files = [file for path in map(Path, paths) for file in (_traces_in(path) if path.is_dir() else [path])]
    if not files:
        raise DataError(f"there is no trace in {', '.join(map(str, paths))}; pass the .json files of all ranks.")
    of_ranks = sorted(((_steps_of(file), file) for file in files), key=lambda one: one[0][0][0].stage)
    stages: dict[int, Path] = {}
    for steps, file in of_ranks:
        for stage in sorted({one.stage for one in steps[0]}):
            if stage in stages:
                raise DataError(
                    f"{stages[stage]} and {file} both have stage {stage}; pass the traces of one pipeline's ranks."
                )
            stages[stage] = file
    if missing := sorted(set(range(max(stages) + 1)) - set(stages)):
        raise DataError(f"no trace has stage {missing[0]}; pass those of all ranks of the pipeline.")
    return [PipelineStep([*ranks]) for ranks in zip(*(steps for steps, _ in of_ranks), strict=False)]


def _traces_in(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.json"), *directory.glob("*.json.gz")])


def _steps_of(path: Path) -> list[list[Pass]]:
    """The passes of each training step of a rank: a pass that has been seen begins the next step."""
    steps: list[list[Pass]] = [[]]
    for one in _passes_of(path):
        if any(_key(one) == _key(other) for other in steps[-1]):
            steps.append([])
        steps[-1].append(one)
    steps = [passes for passes in steps if any(one.part != "forward" for one in passes)]  # without evaluations
    if not steps:
        raise DataError(f"{path} has no passes of a pipeline; record a step of a run with several stages.")
    return steps


def _key(one: Pass) -> tuple[str, int, int]:
    return one.part, one.micro_batch, one.stage


def _passes_of(path: Path) -> list[Pass]:
    """All passes in a trace, by time."""
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        trace = json.loads(text)
        start = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
        events = [one for one in trace["traceEvents"] if one.get("ph") == "X" and one.get("cat") in _MARKS]
        for category in _MARKS:
            found = [
                (match, one) for one in events if one["cat"] == category and (match := re.match(PASS_NAME, one["name"]))
            ]
            if found:
                break
        made = [_pass(match, start + one["ts"] / 1e6, one["dur"] / 1e6) for match, one in found]
    except (OSError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} is not a trace of torch's profiler: {error}") from error
    return sorted(made, key=lambda one: one.begin)


def _pass(match: re.Match[str], begin: float, seconds: float) -> Pass:
    part, micro_batch, stage = match.groups()
    return Pass(cast("Part", part), int(micro_batch), int(stage), begin, begin + seconds)
