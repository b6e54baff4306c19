"""Sends what a run reports to trackers: TensorBoard, CSV, W&B, MLflow, Comet, Trackio, or one of your own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onstep.errors import ConfigError
from onstep.events import Callback, CallbackContext
from onstep.sinks import (
    MetricSink,
    Point,
    RunIdentity,
    RunPoints,
    SinkQueue,
    check_sink,
    make_sink,
    path_id,
    plain_point,
    points_for,
    run_record,
)

Sinks = str | MetricSink | Sequence[str | MetricSink]


class MetricSinks(Callback):
    """Sends every logged step, evaluation and test to trackers, each in a thread of its own behind a bounded queue.

    A tracker that is slow, raises, hangs or dies costs one warning and shows as `sink/dropped` (points that trackers
    did not take) in the logs; it never holds or ends the training (but one that computes in Python shares the
    interpreter with it), and the journal is complete without it: ``onstep logs replay RUN --to NAME`` fills the tracker
    afterwards, `onstep.sinks.replay` one of your own. A run that continues from a checkpoint goes on in
    the same run of each tracker, and CSV and TensorBoard show each step once.

    Trackers get the names that Hugging Face's integrations use (`train/loss`, `eval/loss`, `test/loss`), CSV those of
    the journal. Of a list with one entry a rank the largest is sent; what is no number is left out.

    Args:
        sinks: Names (csv, tensorboard, wandb, mlflow, comet, trackio) or objects with a name and the methods of
            `MetricSink`; one or a list. `keeps_names` and `takes_back` are False where they have none.
        queue_capacity: Points that wait for a tracker at the most; of more, the newest are dropped.
        close_timeout: Seconds that the end of the run waits for all trackers together.

    Raises:
        ConfigError: for a name that no tracker has, and an object that lacks a method.
    """

    ranks = "main"

    def __init__(self, sinks: Sinks, queue_capacity: int = 1000, close_timeout: float = 30.0) -> None:
        if queue_capacity < 1:
            raise ConfigError(f"queue_capacity must be at least 1 point, got {queue_capacity}.")
        if not close_timeout >= 0:
            raise ConfigError(f"close_timeout must be >= 0 seconds, got {close_timeout}; 0 does not wait at all.")
        self.queue_capacity = queue_capacity
        self.close_timeout = close_timeout
        self._queues = _queues(sinks, queue_capacity, close_timeout)
        self._points = RunPoints()
        self._memory: dict[str, Any] = {}
        """What is known of the run between its moments: `run`, `state` (Hugging Face's view), `resumed`."""

    @property
    def sinks(self) -> list[MetricSink]:
        """The trackers, in order."""
        return [queue.sink for queue in self._queues.values()]

    @property
    def dropped(self) -> int:
        """Points that the trackers did not take, all trackers together."""
        return sum(queue.dropped for queue in self._queues.values())

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the trackers, where the run continues or from the start."""
        resumed = self._memory.pop("resumed", None)
        step = context.trainer_state.global_step
        if resumed is not None:
            self._points = RunPoints(_points_in(resumed))
        elif step == 0 and not self._has_evaluated_only(context):
            self._points = RunPoints()
        else:  # the trackers were closed, so they have what they were given
            self._points = RunPoints(self._points.recent.last)
        run, before = _identity(context), self._memory.get("run")
        self._memory |= {"run": run, "state": context.trainer_state}
        goes_on = resumed is None and step > 0 and before is not None and before.run_id == run.run_id
        self._open(run, self._states() if goes_on else _states_in(resumed, run))

    def on_log_step(self, context: CallbackContext) -> None:
        """Add `sink/dropped` to the logs, once anything was dropped."""
        if self.dropped and context.logs is not None:
            context.logs["sink/dropped"] = context.logs.get("sink/dropped", 0) + self.dropped

    def on_log(self, context: CallbackContext) -> None:
        """Send a logged step, or the final metrics."""
        self._send(context, context.logs)

    def on_eval_end(self, context: CallbackContext) -> None:
        """Send an evaluation."""
        self._send(context, context.metrics)

    def on_test_end(self, context: CallbackContext) -> None:
        """Send a test."""
        self._send(context, context.metrics)

    def on_run_end(self, context: CallbackContext) -> None:
        """Close the trackers; a later evaluation opens them again."""
        for queue in self._queues.values():
            queue.begin_close(context.reason or "completed")
        end = time.monotonic() + self.close_timeout
        for queue in self._queues.values():
            queue.finish_close(end - time.monotonic())

    def state_dict(self) -> dict[str, Any]:
        """What continues the run in each tracker, and the points that a kill might take from one."""
        run, state = self._memory.get("run"), self._memory.get("state")
        return {
            "run_id": None if run is None else run.run_id,
            "step": None if state is None else state.global_step,
            "last_points": [plain_point(point) for point in self._points.recent.unsettled(self._num_waiting)],
            "sinks": self._states(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's run when training begins; while training, go back to the checkpoint at once."""
        if not any(queue.is_open for queue in self._queues.values()):
            self._memory["resumed"] = dict(state_dict)
            return
        self._points = RunPoints(_points_in(state_dict))
        run = replace(self._memory["run"], start_step=state_dict["step"] or 0)
        self._memory["run"] = run
        self._open(run, _states_in(state_dict, run))

    @property
    def _num_waiting(self) -> int:
        return max((queue.num_waiting for queue in self._queues.values()), default=0)

    def _has_evaluated_only(self, context: CallbackContext) -> bool:
        """Whether what was sent so far is an evaluation of this run before its first step."""
        run = self._memory.get("run")
        return self._points.recent.last_step == 0 and run is not None and bool(run.adds_only)

    def _open(self, run: RunIdentity, states: Mapping[str, Any]) -> None:
        for name, queue in self._queues.items():
            last = () if run.adds_only else points_for(_keeps_names(queue.sink), self._points.recent.kept)
            queue.open(replace(run, last_points=last), states.get(name, {}))

    def _send(self, context: CallbackContext, metrics: Mapping[str, Any] | None) -> None:
        if metrics is None:
            return
        if not all(queue.is_open for queue in self._queues.values()):
            self._open_to_add(context)
        kept, shown = self._points.add(metrics, context.trainer_state.global_step, time.time())
        for queue in self._queues.values():
            point = kept if _keeps_names(queue.sink) else shown
            queue.log(point.metrics, point.step, point.timestamp)
        self._points.recent.forget(self._num_waiting)

    def _open_to_add(self, context: CallbackContext) -> None:
        """Open the trackers for an evaluation outside of training, which adds to what there is."""
        run = replace(_identity(context), adds_only=True)
        resumed = self._memory.get("resumed")
        self._memory |= {"run": run, "state": context.trainer_state}
        self._open(run, self._states() if resumed is None else _states_in(resumed, run))

    def _states(self) -> dict[str, Any]:
        return {name: queue.state_dict() for name, queue in self._queues.items()}


def _queues(sinks: Sinks, capacity: int, close_timeout: float) -> dict[str, SinkQueue]:
    """A queue for each sink, by its name; a second one of a name gets a number."""
    given = [sinks] if isinstance(sinks, str) or not isinstance(sinks, Sequence) else list(sinks)
    queues: dict[str, SinkQueue] = {}
    for one in given:
        sink = make_sink(one) if isinstance(one, str) else one
        check_sink(sink)
        name, number = sink.name, 2
        while name in queues:
            name, number = f"{sink.name}-{number}", number + 1
        queues[name] = SinkQueue(sink, capacity, close_timeout)
    return queues


def _keeps_names(sink: MetricSink) -> bool:
    return bool(getattr(sink, "keeps_names", False))


def _identity(context: CallbackContext) -> RunIdentity:
    """The run that `context` is of: the run folder's, else one that its folder's path gives."""
    folder = _folder(context)
    record = _run_record(context, folder)
    named = record.get("name") or getattr(context.args, "run_name", None) or folder.absolute().name
    return RunIdentity(
        name=str(named),
        run_id=str(record.get("run_id") or path_id(folder)),
        folder=folder,
        config=_config(context),
        start_step=context.trainer_state.global_step,
    )


def _folder(context: CallbackContext) -> Path:
    for name in ("logging_dir", "output_dir"):
        folder = getattr(context.args, name, None)
        if folder is not None:
            return Path(folder)
    return Path()


def _run_record(context: CallbackContext, folder: Path) -> dict[str, Any]:
    """The content of the run's `run.json`; {} for a run without one."""
    run_folder = getattr(context.state, "run_folder", None)
    output = getattr(context.args, "output_dir", None)
    places = [getattr(run_folder, "path", None), folder, None if output is None else Path(output)]
    records = (run_record(place) for place in places if place is not None)
    return next((record for record in records if record), {})


def _config(context: CallbackContext) -> dict[str, Any]:
    to_dict = getattr(getattr(context.state, "cfg", None), "to_dict", None)
    return to_dict() if callable(to_dict) else {}


def _states_in(state_dict: Mapping[str, Any] | None, run: RunIdentity) -> dict[str, Any]:
    """The trackers' states of a checkpoint; none where it is another run's, whose runs are not to be written to."""
    if state_dict is None or state_dict.get("run_id") != run.run_id:
        return {}
    return dict(state_dict["sinks"])


def _points_in(state_dict: Mapping[str, Any]) -> list[Point]:
    return [Point(**one) for one in state_dict["last_points"]]
