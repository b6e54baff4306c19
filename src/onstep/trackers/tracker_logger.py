"""Defines `TrackerLogger`, which sends a user's own points to one tracker of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from onstep.record import Record
from onstep.trackers.feed import TrackerFeed
from onstep.trackers.lines import MemoryLines, RecordLines
from onstep.trackers.numbers import is_number, read_numbers, saved_mapping
from onstep.trackers.progress import DIRECTORY, Place, Progress, file_name, progress_of
from onstep.trackers.tag_record import VS_SAMPLES
from onstep.trackers.tracker import RunIdentity

_PLAIN = (str, list, dict, int, float, type(None))
CLOSE_TIMEOUT = 30.0
"""Seconds that the end of a run waits for all trackers together."""


class TrackerLogger:
    """A tracker of a run. No method blocks, and none raises because of the tracker's faults.

    Points become lines of the run's record for this tracker alone, and are sent from there.

    Args:
        feed: feeds the tracker.
        clock: returns Unix seconds.
    """

    def __init__(self, feed: TrackerFeed, clock: Callable[[], float] = time.time) -> None:
        self.feed = feed
        self._clock = clock
        self._last_step = 0
        self._memory: dict[str, Any] | None = None
        """The state of a checkpoint, to be continued where there is no record."""
        self._reads_record = False
        self._lines: MemoryLines | None = None
        """Those in memory of the run that was open last."""

    @property
    def reads_record(self) -> bool:
        """Whether it has what the record of the run has, and needs nothing else."""
        return self._reads_record

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a point to each curve, by default at the step of the last point."""
        self._append(step, metrics=dict(metrics))

    def log_metric(self, name: str, value: Any, step: int | None = None) -> None:
        """Add a point to a curve."""
        self.log_metrics({name: value}, step)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """W&B's name for `log_metrics`; values that are not numbers are shown by a tracker with `media`."""
        media = {name: value for name, value in metrics.items() if not is_number(value)}
        if numbers := {name: value for name, value in metrics.items() if name not in media}:
            self.log_metrics(numbers, step)
        if media:
            self.feed.media(media, self._last_step if step is None else step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        """Show a text."""
        self._append(step, tag=tag, text=text)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        """Add a point to a curve, as `SummaryWriter` does; a tag that ends in `vs samples` is plotted over samples."""
        if tag.endswith(VS_SAMPLES):
            self._append(None, metrics={tag: scalar_value}, samples=global_step)
        else:
            self.log_metrics({tag: scalar_value}, global_step)

    def add_tags(self, over_steps: Mapping[str, Any], over_samples: Mapping[str, Any], step: int, samples: int) -> None:
        """Add a point to each of Megatron Bridge's curves."""
        self.log_metrics(over_steps, step)
        if over_samples:
            self._append(step, metrics=dict(over_samples), samples=samples)

    def add(self, line: Record, step: int) -> None:
        """Add a line like those of the record, where there is none."""
        if isinstance(self.feed.lines, MemoryLines):
            self.feed.lines.append({"timestamp": self._clock(), **line}, step)
        self._last_step = step
        self.feed.wake()

    def open(
        self,
        run: RunIdentity,
        record: Path | None = None,
        append: Callable[[Record, int], None] | None = None,
        is_new: bool = False,
    ) -> None:
        """Start or resume the run.

        Args:
            record: the record of the run; None where it has none.
            append: appends a line to it.
            is_new: whether the run begins, whatever its directory has.
        """
        self._last_step = run.start_step
        saved, self._memory = (None if is_new else self._memory), None
        progress = None if saved is None else Progress.from_state(saved["progress"])
        self._reads_record = record is not None
        if record is not None:
            if self._lines is not None and not is_new:  # an evaluation came before the run had a record
                place, self._lines = Place(state=dict(self.feed.tracker.state_dict())), None
                progress = replace(self.feed.settled or Progress(), run_id=run.run_id, places=(place,), last=place)
            file = record.parent / DIRECTORY / file_name(self.feed.name)
            known = Progress(run.run_id) if is_new else progress_of(run.run_id, file, progress)
            self.feed.open(run, RecordLines(record, append), file, known)
            return
        lines = MemoryLines(() if saved is None else saved["lines"])
        if saved is None and not is_new and self._lines is not None:
            lines, progress = self._lines, self.feed.settled
        self._lines = lines
        self.feed.open(run, lines, None, progress_of(run.run_id, None, progress))

    def load_state_dict(
        self, state: Mapping[str, Any], run_id: str | None = None, step: int = 0, samples: int = 0
    ) -> None:
        """Keep the state of a checkpoint until `open`; for another run than `run_id`, only its lines count.

        Args:
            step: of the checkpoint.
            samples: trained on up to there.
        """
        if not state:
            self._memory = None
            return
        where = f"the checkpoint's state of the tracker {self.feed.name!r}"
        progress, lines = saved_mapping(state, "progress", where), state.get("lines", [])
        if not isinstance(lines, list) or not all(isinstance(line, Mapping) for line in lines):
            lines = []
        known = Progress.from_state(progress) if progress else None
        if known is None and "sink" in state:  # before version 0.5
            at = Place(state={"step": step + 1, "samples": samples + 1})
            known = Progress(step=step, places=(at,), state=saved_mapping(state, "sink", where))
        known = known or Progress()
        last = Place(max(known.last.end - known.place.end, 0))
        known = replace(known, run_id=run_id or "", places=(Place(state=known.place.state),), last=last)
        self._memory = {"progress": known.state_dict(), "lines": [dict(line) for line in lines]}

    def state_dict(self) -> dict[str, Any]:
        """State to continue the run where there is no record: the tracker's progress, and the lines that it may lack.
        {} where there is one.

        Reads the device.
        """
        lines, settled = self._lines, self.feed.settled
        if self.reads_record:
            return {}
        if settled is None or lines is None:
            return {} if self._memory is None else dict(self._memory)
        waiting = lines.read(settled.place.line)
        return {"progress": settled.state_dict(), "lines": [_plain(line.data) for line in waiting]}

    def make_durable(self) -> None:
        """Fsync the tracker's local files; may be called from another thread."""
        self.feed.make_durable()

    def __getattr__(self, name: str) -> Any:
        """A method or attribute of the service itself, such as `add_histogram`, `run`, `config` or `log_artifact`.

        It is called in the caller's thread, and its faults are the caller's. Waits until the tracker's run is open.

        Raises:
            AttributeError: if the service has none of this name, or its run is not open.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.feed.client(), name)

    def flush(self) -> None:
        """Do nothing: the thread sends points immediately. Exists for clients that call it."""

    def close(self, status: str = "completed") -> None:
        """Send what is left, waiting at most `CLOSE_TIMEOUT`."""
        close_together([self], status)

    def _append(self, step: int | None, **data: Any) -> None:
        lines, step = self.feed.lines, self._last_step if step is None else step
        self._last_step = step
        if lines is not None:
            lines.append({"timestamp": self._clock(), "kind": "tracker", "to": self.feed.name, **data}, step)
            self.feed.wake()


def close_together(loggers: Iterable[TrackerLogger], status: str, timeout: float = CLOSE_TIMEOUT) -> None:
    """Close trackers in parallel, waiting at most `timeout` seconds for all of them together."""
    feeds = [logger.feed for logger in loggers]
    deadline = time.monotonic() + timeout
    for feed in feeds:
        feed.begin_close(status)
    for feed in feeds:
        feed.finish_close(deadline - time.monotonic())


def _plain(line: Record) -> Record:
    """A line with plain values for a checkpoint; reads those that are still on a device."""
    metrics = line.get("metrics")
    read = {**line, "metrics": read_numbers(metrics)} if isinstance(metrics, Mapping) else line
    return {
        name: one if isinstance(one, (str, list, dict, int, float, type(None))) else repr(one)
        for name, one in read.items()
    }
