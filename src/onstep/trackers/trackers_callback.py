"""Defines `TrackersCallback`, the callback that sends a run's metrics to trackers: built-in ones or your own."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from onstep.analysis.logs.run_status import run_record
from onstep.config import ConfigContainer
from onstep.config.trackers import name_list
from onstep.errors import ConfigError
from onstep.events import Callback, CallbackContext
from onstep.files.bounded_reading import brief
from onstep.trackers.metric_names import BRIDGE, HF
from onstep.trackers.points import RunPoints, is_step, plain_point, points_for, saved_mapping, saved_points
from onstep.trackers.refill import path_id
from onstep.trackers.registry import check_tracker, make_tracker
from onstep.trackers.services.tensorboard_tracker import TensorBoardTracker
from onstep.trackers.tracker import RunIdentity, Tracker
from onstep.trackers.tracker_logger import SAMPLES_DIR, TrackerLogger, close_together
from onstep.trackers.tracker_queue import TrackerQueue

logger: logging.Logger = logging.getLogger(__name__)

_WHERE = "the checkpoint's state of the trackers"

TrackerSpecs = str | Tracker | Sequence[str | Tracker]
Names = Sequence[str] | Mapping[str, Sequence[str]]
"""The naming schemes for all trackers, or per tracker."""


class TrackersCallback(Callback):
    """Sends every logged step, evaluation and test to trackers, each in its own thread behind a bounded queue.

    A tracker that is slow, raises, hangs or dies only causes one warning and shows up as `sink/dropped` (points not
    delivered) in the logs. It never blocks or ends training, although one that computes in Python competes for the
    interpreter. The metrics log is complete without it: ``onstep logs replay RUN --to NAME`` fills the tracker
    afterwards, and `onstep.trackers.replay` fills one of your own. A run resumed from a checkpoint continues the same
    run in each tracker, and CSV and TensorBoard show each step once.

    Trackers use the metric names of Hugging Face's integrations (`train/loss`, `eval/loss`, `test/loss`), CSV those of
    the metrics log; with `names=["hf", "bridge"]`, the same run of a tracker also gets Megatron Bridge's tags. For a
    list with one entry per rank, the maximum is sent; values that are not numbers are omitted.

    Args:
        trackers: Names, such as csv, or objects with a name and the methods of `Tracker`; one or a list. `keeps_names`
            and `takes_back` default to False.
        queue_capacity: Maximum number of points queued for a tracker; when full, new points are dropped.
        close_timeout: Seconds that the end of the run waits for all trackers together.
        names: Naming schemes of the trackers: hf, bridge, or both; a dictionary sets them per tracker.

    Raises:
        ConfigError: for an unknown tracker, and for an object that lacks a method.
    """

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
        if queue_capacity < 1:
            raise ConfigError(f"queue_capacity must be at least 1 point, got {queue_capacity}.")
        if not close_timeout >= 0:
            raise ConfigError(f"close_timeout must be >= 0 seconds, got {close_timeout}; pass 0 not to wait.")
        self.queue_capacity = queue_capacity
        self.close_timeout = close_timeout
        chosen = names if isinstance(names, Mapping) else name_list(names, "names") or ()
        self._loggers = _loggers(trackers, queue_capacity, close_timeout, chosen)
        self._names = {name: _names_of(name, chosen) for name in self._loggers}
        self._points = RunPoints()
        self._memory: dict[str, Any] = {}
        """Facts about the run kept between events: `run`, `state` (Hugging Face's view), `resumed`."""

    @property
    def trackers(self) -> list[Tracker]:
        """The trackers, in order."""
        return [logger.queue.tracker for logger in self._loggers.values()]

    @property
    def tag_loggers(self) -> dict[str, TrackerLogger]:
        """The trackers that show Megatron Bridge's tags; the loop sends the tags."""
        return {name: logger for name, logger in self._loggers.items() if BRIDGE in self._names[name]}

    @property
    def dropped(self) -> int:
        """Number of points not delivered, over all trackers."""
        return sum(queue.dropped for queue in self._queues)

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the trackers, at the step that the run resumes from or at the start."""
        resumed = self._memory.pop("resumed", None)
        step, run, before = context.trainer_state.global_step, _identity(context), self._memory.get("run")
        if resumed is not None:
            states = self._states_in(resumed, run)
        elif step == 0 and not self._has_evaluated_only():
            states = {}
        else:  # the trackers were closed, so all points were delivered
            is_same = step > 0 and before is not None and before.run_id == run.run_id
            states = self._states() if is_same else _of_another_run(self._states())
        if not states:
            self._points = RunPoints()
        self._begin(context, run, states)

    def on_log_step(self, context: CallbackContext) -> None:
        """Add `sink/dropped` to the logs once points have been dropped."""
        if self.dropped and context.logs is not None:
            context.logs["sink/dropped"] = context.logs.get("sink/dropped", 0) + self.dropped

    def on_log(self, context: CallbackContext) -> None:
        """Send a logged step, the final metrics or a Trainer's evaluation."""
        self._send(context, context.logs)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Send an evaluation; a `Trainer` has sent it to `on_log`."""
        if context.trainer is None:
            self._send(context, context.metrics)

    def on_test_end(self, context: CallbackContext) -> None:
        """Send a test."""
        self._send(context, context.metrics)

    def on_run_end(self, context: CallbackContext) -> None:
        """Close the trackers; a later evaluation reopens them."""
        close_together(self._loggers.values(), context.reason or "completed", self.close_timeout)

    def state_dict(self) -> dict[str, Any]:
        """State to resume the run in each tracker, and the points that a tracker might lose in a kill."""
        run, state = self._memory.get("run"), self._memory.get("state")
        return {
            "run_id": None if run is None else run.run_id,
            "step": None if state is None else state.global_step,
            "samples": _samples(self._memory.get("progress")),
            "shown": self._points.state_dict(),
            "sinks": self._states(),
        }

    def make_durable(self) -> None:
        """Fsync the trackers' local files, before a checkpoint that refers to them is committed."""
        for logger in self._loggers.values():
            logger.make_durable()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume a checkpoint's run: when training begins, or immediately in a rollback."""
        if not any(queue.is_open for queue in self._queues):
            self._memory["resumed"] = dict(state_dict)
            return
        run = replace(self._memory["run"], start_step=_saved_count(state_dict, "step"))
        self._memory["run"] = run
        self._open(run, self._states_in(state_dict, run), _saved_count(state_dict, "samples"))

    @property
    def _queues(self) -> list[TrackerQueue]:
        return [queue for logger in self._loggers.values() for queue in logger.queues]

    def _has_evaluated_only(self) -> bool:
        """Whether only an evaluation before this run's first step has been sent so far."""
        run = self._memory.get("run")
        is_sent = any(logger.recent.last_step == 0 for logger in self._loggers.values())
        return is_sent and run is not None and bool(run.adds_only)

    def _open(self, run: RunIdentity, states: Mapping[str, Any], samples: int) -> None:
        for name, logger in self._loggers.items():
            logger.open(run, states.get(name, {}), samples)

    def _send(self, context: CallbackContext, metrics: Mapping[str, Any] | None) -> None:
        if metrics is None:
            return
        if not all(queue.is_open for queue in self._queues):
            self._open_to_add(context)
        kept, shown = self._points.add(metrics, context.trainer_state.global_step, time.time())
        for name, logger in self._loggers.items():
            point = kept if getattr(logger.queue.tracker, "keeps_names", False) else shown
            if HF in self._names[name] and point.metrics:
                logger.add(point.metrics, point.step, point.timestamp)

    def _open_to_add(self, context: CallbackContext) -> None:
        """Open the trackers for an evaluation outside of training, which appends to existing points."""
        run = replace(_identity(context), adds_only=True)
        resumed = self._memory.get("resumed")
        self._begin(context, run, self._states() if resumed is None else self._states_in(resumed, run))

    def _begin(self, context: CallbackContext, run: RunIdentity, states: Mapping[str, Any]) -> None:
        """Open the trackers, and record which run they belong to."""
        progress = getattr(context.state, "train_state", None)
        self._memory |= {"run": run, "state": context.trainer_state, "progress": progress}
        self._open(run, states, _samples(progress))

    def _states(self) -> dict[str, Any]:
        return {name: logger.state_dict() for name, logger in self._loggers.items()}

    def _states_in(self, state_dict: Mapping[str, Any], run: RunIdentity) -> dict[str, Any]:
        """The trackers' states in a checkpoint; also restores which points they already show.

        From another run's checkpoint only the points are used: its runs in the trackers must not be written to.
        """
        self._points = RunPoints(saved_mapping(state_dict, "shown", _WHERE))
        sinks = saved_mapping(state_dict, "sinks", _WHERE)
        states: dict[str, Any] = {name: saved_mapping(sinks, name, _WHERE) for name in sinks}
        if "last_points" in state_dict:  # before version 0.5 all trackers shared them, under the metrics log's names
            points = saved_points(state_dict["last_points"], _WHERE)
            for name, logger in self._loggers.items():
                last = points_for(getattr(logger.queue.tracker, "keeps_names", False), points)
                states[name] = {"sink": states.get(name, {}), "last": [plain_point(point) for point in last]}
        return states if state_dict.get("run_id") == run.run_id else _of_another_run(states)


def _loggers(trackers: TrackerSpecs, capacity: int, close_timeout: float, names: Names) -> dict[str, TrackerLogger]:
    """A logger for each tracker, by name; a second tracker with the same name gets a number."""
    given = [trackers] if isinstance(trackers, str) or not isinstance(trackers, Sequence) else list(trackers)
    loggers: dict[str, TrackerLogger] = {}
    for one in given:
        tracker = make_tracker(one) if isinstance(one, str) else one
        check_tracker(tracker)
        name, number = tracker.name, 2
        while name in loggers:
            name, number = f"{tracker.name}-{number}", number + 1
        queue = TrackerQueue(tracker, capacity, close_timeout)
        if isinstance(tracker, TensorBoardTracker) and BRIDGE in _names_of(name, names):
            over_samples = TrackerQueue(tracker.beside(SAMPLES_DIR), capacity, close_timeout)
            loggers[name] = TrackerLogger(queue, over_samples=over_samples)
        else:
            loggers[name] = TrackerLogger(queue)
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


def _of_another_run(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**state, "sink": {}} for name, state in states.items()}
