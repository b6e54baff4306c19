"""Converts the lines of a run to the points and texts that a tracker gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from onstep.record import Record, without_wall_clock
from onstep.record.gaps import MISSING
from onstep.record.history import BRIDGE_KEY, INFO_KEY, is_reported
from onstep.record.saved_log import step_of
from onstep.trackers.metric_names import BRIDGE, HF, bridge_names, tracker_names
from onstep.trackers.numbers import is_step, numbers_of, read_numbers
from onstep.trackers.tag_record import VS_SAMPLES, checked_rows

_EPOCH = "train/epoch"
_HEAD = frozenset({"timestamp", "global_step", "kind", MISSING, BRIDGE_KEY, INFO_KEY})


@dataclass(frozen=True)
class Shown:
    """What a tracker that cannot take points back has of a step that was taken back and comes again."""

    tags_until: int = -1
    """The highest step of which it has Megatron Bridge's tags."""
    tags: Collection[str] = ()
    """The tags that it has of that step."""


class Projection:
    """The calls of a tracker that a line stands for: Hugging Face's names and Megatron Bridge's tags are two tables.

    A metric that the tracker shows at the same step with the same value, which final metrics and evaluations repeat, is
    left out, unless the tracker keeps the record's names. Of an evaluation that is repeated with the same results, its
    other times are left out, too.

    Args:
        names: Naming schemes: hf, bridge, or both.
        tracker: What is called.
        step: The last step that it shows.
        values: What it shows at that step.
        is_record: Whether the lines are a record's, where Megatron Bridge's tags come with the next logged step.
    """

    def __init__(
        self,
        names: Sequence[str],
        tracker: Any,
        step: int = -1,
        values: Mapping[str, float] | None = None,
        is_record: bool = False,
    ) -> None:
        self._names, self._tracker = names, tracker
        self._has_late_tags = is_record and BRIDGE in names
        self._keeps_names = bool(getattr(tracker, "keeps_names", False))
        self._step, self._values = step, dict(values or {})
        self.is_complete = True
        """Whether no later line has points of the steps so far."""

    def calls(self, line: Record, is_own: bool = False, shown: Shown | None = None) -> Iterator[Callable[[], None]]:
        """The calls for a line; see `took`.

        Args:
            is_own: Whether it is a line for this tracker alone.
            shown: What the tracker has of the line's step already, and keeps although it is another value now.
        """
        step, timestamp = step_of(line), _time_of(line)
        if is_own:
            yield from self._own(line, step, timestamp)
            return
        if BRIDGE in self._names:
            yield from self._tags(line, Shown() if shown is None else shown)
        if HF in self._names:
            metrics = self._new(line, step, keeps_all=shown is not None)
            if metrics:
                yield partial(self._tracker.log, metrics, step, timestamp)

    def took(self, line: Record) -> None:
        """Note that the tracker has a line."""
        step = step_of(line)
        if not self._keeps_names and HF in self._names and is_reported(line):
            shown = tracker_names(metrics_of(line))
            self._values = {**self.values_at(step), **shown}
            self._step = step
        _, *of_tags = self.steps_of(line)
        if self._has_late_tags and (of_tags or is_reported(line) or line.get("kind") == "tracker"):
            self.is_complete = bool(of_tags)

    def values_at(self, step: int) -> dict[str, float]:
        """What the tracker shows at a step, if that is the last one."""
        return self._values if step == self._step else {}

    def tags_of(self, line: Record) -> Shown:
        """The highest step of a line's tags, and the tags of that step."""
        rows = (checked_rows(line.get(BRIDGE_KEY, {})) or ()) if BRIDGE in self._names else ()
        until = max((row.step for row in rows), default=-1)
        return Shown(until, frozenset(tag for row in rows if row.step == until for tag in row.tags))

    def steps_of(self, line: Record) -> list[int]:
        """The steps of a line and of its tags."""
        tags = line.get(BRIDGE_KEY)
        steps = tags.get("step", ()) if BRIDGE in self._names and isinstance(tags, Mapping) else ()
        return [step_of(line), *filter(is_step, steps if isinstance(steps, list) else ())]

    def names_of(self, lines: Iterable[Record]) -> list[str]:
        """The names of the metrics of lines, in order."""
        if HF not in self._names:
            return []
        return list(dict.fromkeys(name for line in lines if is_reported(line) for name in metrics_of(line)))

    def _new(self, line: Record, step: int, keeps_all: bool) -> dict[str, float]:
        if not is_reported(line):
            return {}
        metrics = metrics_of(line)
        if self._keeps_names:
            return metrics
        known = self.values_at(step)
        if known and _repeats(metrics, known):
            return {}
        shown = tracker_names(metrics)
        if _EPOCH in known:  # after a rollback, the data of a step may be further on than when it was taken
            shown.pop(_EPOCH, None)
        return {
            name: one
            for name, one in shown.items()
            if not (name in known if keeps_all else _is_same(one, known.get(name)))
        }

    def _tags(self, line: Record, shown: Shown) -> Iterator[Callable[[], None]]:
        log_over_samples = getattr(self._tracker, "log_over_samples", None)
        for row in checked_rows(line.get(BRIDGE_KEY, {})) or ():
            if row.step < shown.tags_until:
                continue
            has = shown.tags if row.step == shown.tags_until else ()
            tags = bridge_names(self._tracker.name, {tag: value for tag, value in row.tags.items() if tag not in has})
            if tags:
                yield partial(self._tracker.log, tags, row.step, row.timestamp)
            curves = {tag + VS_SAMPLES: row.tags[tag] for tag in row.over_samples if tag not in has}
            if curves and log_over_samples is not None:
                yield partial(log_over_samples, curves, row.samples, row.timestamp)

    def _own(self, line: Record, step: int, timestamp: float) -> Iterator[Callable[[], None]]:
        if isinstance(line.get("text"), str):
            yield partial(self._tracker.text, str(line.get("tag", "")), line["text"], step)
        metrics = read_numbers(line["metrics"]) if isinstance(line.get("metrics"), Mapping) else {}
        log_over_samples, samples = getattr(self._tracker, "log_over_samples", None), line.get("samples")
        if metrics and samples is None:
            yield partial(self._tracker.log, metrics, step, timestamp)
        elif metrics and log_over_samples is not None and is_step(samples):
            yield partial(log_over_samples, metrics, samples, timestamp)


def metrics_of(line: Record) -> dict[str, float]:
    """The numbers of a line, under the record's names."""
    return read_numbers(numbers_of({name: one for name, one in line.items() if name not in _HEAD}))


def _repeats(metrics: dict[str, float], known: Mapping[str, float]) -> bool:
    """Whether a line's metrics are shown already, but for what the clock has changed: an evaluation made twice."""
    if not all(name in known for name in tracker_names(metrics)):
        return False
    exact = tracker_names(without_wall_clock(metrics))
    return set(exact) - {_EPOCH} != set() and all(_is_same(one, known[name]) for name, one in exact.items())


def _time_of(line: Record) -> float:
    timestamp = line.get("timestamp", 0.0)
    return float(timestamp) if isinstance(timestamp, (int, float)) and abs(timestamp) < 2**53 else 0.0


def _is_same(value: float, before: float | None) -> bool:
    return value == before or (value != value and before is not None and before != before)
