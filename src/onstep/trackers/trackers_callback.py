"""Defines `TrackersCallback`, the callback that sends a run's metrics to trackers: built-in ones or your own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from onstep.analysis.logs.run_status import run_record
from onstep.config import ConfigContainer
from onstep.config.trackers import name_list
from onstep.errors import ConfigError
from onstep.events import Callback, CallbackContext
from onstep.files.bounded_reading import brief
from onstep.trackers.feed import TrackerFeed
from onstep.trackers.metric_names import BRIDGE, HF
from onstep.trackers.numbers import is_step, saved_mapping
from onstep.trackers.registry import check_tracker, make_tracker
from onstep.trackers.tracker import RunIdentity, Tracker, path_id
from onstep.trackers.tracker_logger import TrackerLogger, close_together

logger: logging.Logger = logging.getLogger(__name__)

_WHERE = "the checkpoint's state of the trackers"

TrackerSpecs = str | Tracker | Sequence[str | Tracker]
Names = Sequence[str] | Mapping[str, Sequence[str]]
"""The naming schemes for all trackers, or per tracker."""


class TrackersCallback(Callback):
    """Sends every logged step, evaluation and test to trackers, each in its own thread, from the record of the run.

    A tracker that is slow, raises, hangs or dies only causes one warning, and is behind. It never blocks or ends
    training, although one that computes in Python competes for the interpreter. What it lacks is sent once it works
    again, by the next start of the run, or by ``onstep logs replay RUN --to NAME``. A run resumed from a checkpoint
    continues the same run in each tracker, where each step is shown once.

    Without a record (a run without a directory, Hugging Face's own Trainer), up to 100,000 lines wait in memory, and
    checkpoints contain those that a tracker may lack.

    Trackers use the metric names of Hugging Face's integrations (`train/loss`, `eval/loss`, `test/loss`), CSV those of
    the record; with `names=["hf", "bridge"]`, the same run of a tracker also gets Megatron Bridge's tags. For a list
    with one entry per rank, the maximum is sent; values that are not numbers are omitted.

    Args:
        trackers: Names, such as csv, or objects with a name and the methods of `Tracker`; one or a list. `keeps_names`
            and `takes_back` default to False.
        queue_capacity: Accepted without effect: nothing that waits for a tracker is dropped.
        close_timeout: Seconds that the end of the run waits for all trackers together.
        names: Naming schemes of the trackers: hf, bridge, or both; a dictionary sets them per tracker.

    Raises:
        ConfigError: for an unknown tracker, and for an object that lacks a method.
    """

    reads_weights = False
    state_class: ClassVar[str] = "onstep.callbacks.metric_sinks.MetricSinks"
    """Identifies its state in checkpoints; its place and name in earlier versions."""

    ranks = "main"
    logs_evaluations: ClassVar[bool] = True
    """A Trainer's evaluations come as its `log` passes them on, at `on_log`."""

    def __init__(
        self,
        trackers: TrackerSpecs,
        queue_capacity: int = 1000,
        close_timeout: float = 30.0,
        names: str | Names = (HF,),
    ) -> None:
        if not close_timeout >= 0:
            raise ConfigError(f"close_timeout must be >= 0 seconds, got {close_timeout}; pass 0 not to wait.")
        self.queue_capacity = queue_capacity  # part of the id by which checkpoints of version 0.4 know it
        self.close_timeout = close_timeout
        chosen = names if isinstance(names, Mapping) else name_list(names, "names") or ()
        self._loggers = _loggers(trackers, chosen)
        self._names = {name: _names_of(name, chosen) for name in self._loggers}
        self._memory: dict[str, Any] = {}
        """Facts about the run kept between events: `run`, `state` (Hugging Face's view), `progress`, `resumed`."""

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers, in order."""
        return [logger.feed.tracker for logger in self._loggers.values()]

    @property
    def tag_loggers(self) -> dict[str, TrackerLogger]:
        """The trackers that show Megatron Bridge's tags; the loop sends the tags."""
        return {name: logger for name, logger in self._loggers.items() if BRIDGE in self._names[name]}

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the trackers, at the step that the run resumes from or at the start."""
        step, was_resumed = context.trainer_state.global_step, self._memory.pop("resumed", False)
        is_new = step == 0 and not was_resumed and not self._has_evaluated_only()
        self._begin(context, _identity(context), is_new)

    def on_log(self, context: CallbackContext) -> None:
        """Send a logged step, the final metrics or a Trainer's evaluation."""
        self._send(context, "log", context.logs)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Send an evaluation; a `Trainer` has sent it to `on_log`."""
        if context.trainer is None:
            self._send(context, "evaluation", context.metrics)

    def on_test_end(self, context: CallbackContext) -> None:
        """Send a test."""
        self._send(context, "test", context.metrics)

    def on_run_end(self, context: CallbackContext) -> None:
        """Close the trackers; a later evaluation reopens them."""
        close_together(self._loggers.values(), context.reason or "completed", self.close_timeout)

    def state_dict(self) -> dict[str, Any]:
        """Where there is no record: state to continue the run in each tracker, with the lines that it may lack."""
        run, state = self._memory.get("run"), self._memory.get("state")
        return {
            "run_id": None if run is None else run.run_id,
            "step": None if state is None else state.global_step,
            "samples": _samples(self._memory.get("progress")),
            "sinks": {name: logger.state_dict() for name, logger in self._loggers.items()},
        }

    def make_durable(self) -> None:
        """Fsync the trackers' local files, before a checkpoint that refers to them is committed."""
        for logger in self._loggers.values():
            logger.make_durable()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume a checkpoint's run: when training begins, or immediately in a rollback.

        Args:
            state_dict: what `state_dict()` returned.
        """
        sinks, run = saved_mapping(state_dict, "sinks", _WHERE), self._memory.get("run")
        step, samples = _saved_count(state_dict, "step"), _saved_count(state_dict, "samples")
        rolls_back = any(logger.feed.is_open for logger in self._loggers.values())
        for name, logger in self._loggers.items():
            if rolls_back and logger.reads_record:
                logger.feed.wake()
                continue
            state = saved_mapping(sinks, name, _WHERE)
            logger.load_state_dict(state, run_id=state_dict.get("run_id"), step=step, samples=samples)
            if rolls_back and run is not None:
                logger.open(replace(run, start_step=step))
        if not rolls_back:
            self._memory["resumed"] = True

    def _has_evaluated_only(self) -> bool:
        """Whether only an evaluation before this run's first step has been sent so far."""
        run = self._memory.get("run")
        return run is not None and bool(run.adds_only) and run.start_step == 0

    def _send(self, context: CallbackContext, kind: str, metrics: Mapping[str, Any] | None) -> None:
        if metrics is None:
            return
        for logger in self._loggers.values():
            if not logger.feed.is_open:
                self._begin(context, replace(_identity(context), adds_only=True))
                break
        line, step = {"kind": kind, **metrics} | {"kind": kind}, context.trainer_state.global_step
        for logger in self._loggers.values():
            logger.add(line, step)

    def _begin(self, context: CallbackContext, run: RunIdentity, is_new: bool = False) -> None:
        """Open the trackers, and note which run they belong to."""
        progress = getattr(context.state, "train_state", None)
        self._memory |= {"run": run, "state": context.trainer_state, "progress": progress}
        record, append = _record_of(context)
        for logger in self._loggers.values():
            logger.open(run, record, append, is_new)


def _record_of(context: CallbackContext) -> tuple[Path | None, Callable[[dict[str, Any], int], None] | None]:
    """The record of the run, if it has one, and what appends a line for a tracker."""
    path = getattr(context.state, "record_path", None)
    if path is None:
        return None, None
    run: Any = context.state
    return path, lambda data, step: run.note("tracker", data, step)


def _loggers(trackers: TrackerSpecs, names: Names) -> dict[str, TrackerLogger]:
    """A logger for each tracker, by name; a second tracker with the same name gets a number."""
    given = [trackers] if isinstance(trackers, str) or not isinstance(trackers, Sequence) else list(trackers)
    loggers: dict[str, TrackerLogger] = {}
    for one in given:
        tracker = make_tracker(one) if isinstance(one, str) else one
        check_tracker(tracker)
        name, number = tracker.name, 2
        while name in loggers:
            name, number = f"{tracker.name}-{number}", number + 1
        loggers[name] = TrackerLogger(TrackerFeed(tracker, name, _names_of(name, names)))
    return loggers


def _names_of(tracker: str, names: Names) -> tuple[str, ...]:
    return tuple(names[tracker] if isinstance(names, Mapping) else names)


def _identity(context: CallbackContext) -> RunIdentity:
    """Identify the run of `context` by its run directory, or else by a hash of its path."""
    logging_dir, output_dir = (getattr(context.args, name, None) for name in ("logging_dir", "output_dir"))
    directory = Path(logging_dir or output_dir or "")
    run_dir, config = getattr(context.state, "run_dir", None), getattr(context.state, "cfg", None)
    places = [getattr(run_dir, "path", None), directory, output_dir]
    records = (run_record(Path(place)) for place in places if place is not None)
    record: dict[str, Any] = next((record for record in records if record), {})  # the first `run.json` found
    named = record.get("name") or getattr(context.args, "run_name", None) or directory.absolute().name
    return RunIdentity(
        name=str(named),
        run_id=str(record.get("run_id") or path_id(directory)),
        directory=directory,
        config=shown_config(config) if isinstance(config, ConfigContainer) else {},
        start_step=context.trainer_state.global_step,
    )


def shown_config(config: ConfigContainer) -> dict[str, Any]:
    """The configuration shown in trackers; environment variables by name only, since values may be secrets."""
    return {**config.to_dict(), "env_vars": sorted(config.env_vars)}


def _saved_count(state_dict: Mapping[str, Any], key: str) -> int:
    value = state_dict.get(key) or 0
    if is_step(value):
        return int(value)
    logger.warning("%s: its %s is %s instead of an integer from 0 to 2**63 - 1; 0 is used", _WHERE, key, brief(value))
    return 0


def _samples(progress: Any) -> int:
    """Samples trained on so far; 0 if the progress belongs to another trainer."""
    return getattr(progress, "consumed_train_samples", 0)
