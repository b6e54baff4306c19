"""What a tracker has to offer to be filled from a run, and what it is told of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Point:
    """What was reported at one step, under the names that the sink gets."""

    metrics: Mapping[str, float]
    step: int
    timestamp: float
    """Unix seconds."""


@dataclass(frozen=True)
class RunIdentity:
    """Which run the metrics are of: the same for every restart of the run, but for where it continues."""

    name: str
    """The run's name, shown in trackers."""
    run_id: str
    """Stable over restarts of the run."""
    folder: Path
    """Where a sink may put its local files."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Plain nested values, shown as the run's parameters."""
    start_step: int = 0
    """Step that this process continues from; 0 for a fresh run."""
    last_points: tuple[Point, ...] = ()
    """What the checkpoint that is continued had reported last, and what a kill might have taken from the tracker: whole
    steps, of the last seconds before the checkpoint and whatever waited. Sinks with `takes_back` write these again and
    drop everything else from that step on. The others are given them again, so their segment begins with these and not
    exactly at `start_step`."""
    adds_only: bool = False
    """An evaluation outside of training: nothing that is there is replaced or taken back."""

    @property
    def first_open_step(self) -> int:
        """Points of earlier processes at this step and beyond no longer count."""
        return min((point.step for point in self.last_points), default=self.start_step + 1 if self.start_step else 0)


class MetricSink(Protocol):
    """A tracker. All methods are called from one thread, in order: open, log and text, close.

    A sink may raise and be slow: `SinkQueue` keeps that away from the training. After `close` it may be opened again.
    """

    name: str
    """What messages and checkpoints call it: "wandb"."""
    takes_back: bool
    """Whether points can be replaced: such a sink sees to `RunIdentity.last_points` itself. May be left out: False."""
    keeps_names: bool
    """True: gets the journal's names (`loss`, `eval_loss`); False: `train/loss`, `eval/loss`, `test/loss`. May be left
    out: False."""

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Begin or continue the run in the tracker; `state` is `state_dict()` of the checkpoint, {} for a fresh run."""

    def log(self, metrics: Mapping[str, float], step: int, timestamp: float) -> None:
        """Add a point to each metric's curve; `timestamp` is in unix seconds."""

    def text(self, tag: str, text: str, step: int) -> None:
        """Show a text (samples, a report) under `tag`."""

    def state_dict(self) -> dict[str, Any]:
        """What continues the same run (ids), as plain JSON values; cheap, no network; asked for after every call."""

    def close(self, status: str) -> None:
        """Hand over what waits and let go; `status` is completed, stopped, preempted or failed."""
