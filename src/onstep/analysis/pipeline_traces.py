"""Reads the passes of a pipeline from recorded traces of its ranks, and tells how much of a step its ranks are idle."""

from __future__ import annotations

import gzip
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, cast

from onstep.config.pipelines import PASS_NAME, Part
from onstep.errors import DataError

_MARKS = ("gpu_user_annotation", "user_annotation")
"""Categories of what a profiler marks by name: the time of a GPU if it has been recorded, else that of the host."""


_PAIR = "OVERLAP_F_B"
"""In torch's name of a forward pass and a backward pass after which it sends the results of both."""
_Result = tuple[str, int, int]
"""What a pass computes: direction, micro-batch, stage."""


@dataclass(frozen=True)
class Pass:
    """A pass of a micro-batch through a stage."""

    part: Part
    micro_batch: int
    stage: int
    begin: float
    """Seconds, on the clock of the trace."""
    end: float
    is_sent_late: bool = False
    """Whether other ranks get what it has computed only after the next pass, as in the pairs of `DualPipeV`."""


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
        return PipelineStep(_Order(self).done)


class _Order:
    """Repeats the passes of a step, each as soon as what it depends on is done."""

    def __init__(self, step: PipelineStep) -> None:
        self._num_stages = 1 + max(one.stage for one in chain(*step.ranks))
        self._lasts = _medians(chain(*step.ranks))
        self._left = [list(reversed(passes)) for passes in step.ranks]
        self._sent: dict[_Result, float] = {}
        """When other ranks have what a pass has computed."""
        self._known: list[dict[_Result, float]] = [{} for _ in step.ranks]
        """When a rank has what its own passes have computed."""
        self._unsent: list[list[_Result]] = [[] for _ in step.ranks]
        self.done: list[list[Pass]] = [[] for _ in step.ranks]
        while any(self._left):
            has_moved = [self._move(rank) for rank in range(len(self.done))]
            if not any(has_moved):
                one = next(passes[-1] for passes in self._left if passes)
                raise DataError(f"what {one.part} {one.micro_batch} of stage {one.stage} follows is missing.")

    def _move(self, rank: int) -> bool:
        """Let a rank do its next pass, if it can."""
        if not self._left[rank]:
            return False
        one, done = self._left[rank][-1], self.done[rank]
        needed = _needed(one, self._num_stages)
        ready = 0.0 if needed is None else self._known[rank].get(needed, self._sent.get(needed))
        if ready is None:
            return False
        begin = max(ready, done[-1].end if done else 0.0)
        end = begin + self._lasts[one.part, one.stage]
        result = _direction(one.part), one.micro_batch, one.stage
        self._known[rank][result] = end
        self._unsent[rank].append(result)
        if not one.is_sent_late:
            self._sent |= dict.fromkeys(self._unsent[rank], end)
            self._unsent[rank].clear()
        done.append(replace(one, begin=begin, end=end))
        self._left[rank].pop()
        return True


def _direction(part: Part) -> str:
    return "backward" if part == "input gradient" else part


def _needed(one: Pass, num_stages: int) -> _Result | None:
    """What must have been computed before."""
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
        made = sorted((_pass(match, start + one["ts"] / 1e6, one["dur"] / 1e6) for match, one in found), key=_begin)
        pairs = [
            (start + one["ts"] / 1e6, start + (one["ts"] + one["dur"]) / 1e6) for one in events if _PAIR in one["name"]
        ]
    except (OSError, EOFError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{path} is not a trace of torch's profiler: {error}") from error
    return [replace(one, is_sent_late=_in_pair(one, after, pairs)) for one, after in zip_longest(made, made[1:])]


def _begin(one: Pass) -> float:
    return one.begin


def _in_pair(one: Pass, after: Pass | None, pairs: list[tuple[float, float]]) -> bool:
    """Whether a pass and the one after it are a pair."""
    return after is not None and any(begin <= one.begin and after.end <= end for begin, end in pairs)


def _pass(match: re.Match[str], begin: float, seconds: float) -> Pass:
    part, micro_batch, stage = match.groups()
    return Pass(cast("Part", part), int(micro_batch), int(stage), begin, begin + seconds)
