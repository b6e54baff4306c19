"""The callback that sends what a run reports to trackers: those that Onstep knows, or your own."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onstep.analysis.logs.run_status import run_record
from onstep.config import ConfigContainer
from onstep.config.reporting import name_list
from onstep.errors import ConfigError
from onstep.events import Callback, CallbackContext
from onstep.trackers.metric_names import BRIDGE, HF, check_sink, make_sink
from onstep.trackers.points import RunPoints, plain_point, points_for
from onstep.trackers.replay import path_id
from onstep.trackers.services.tensorboard_tracker import TensorBoardSink
from onstep.trackers.tracker import MetricSink, Point, RunIdentity
from onstep.trackers.tracker_logger import SAMPLES_FOLDER, TrackerLogger, close_together
from onstep.trackers.tracker_queue import SinkQueue

Sinks = str | MetricSink | Sequence[str | MetricSink]
Names = Sequence[str] | Mapping[str, Sequence[str]]
"""The tables of names that all trackers show, or each."""


class MetricSinks(Callback):
    """Sends every logged step, evaluation and test to trackers, each in a thread of its own behind a bounded queue.

    A tracker that is slow, raises, hangs or dies costs one warning and shows as `sink/dropped` (points that trackers
    did not take) in the logs; it never holds or ends the training (but one that computes in Python shares the
    interpreter with it), and the journal is complete without it: ``onstep logs replay RUN --to NAME`` fills the tracker
    afterwards, `onstep.trackers.replay` one of your own. A run that continues from a checkpoint goes on in
    the same run of each tracker, and CSV and TensorBoard show each step once.

    Trackers get the names that Hugging Face's integrations use (`train/loss`, `eval/loss`, `test/loss`), CSV those of
    the journal; with `names=["hf", "bridge"]` the same run of a tracker gets Megatron Bridge's tags too. Of a list with
    one entry a rank the largest is sent; what is not a number is left out.

    Args:
        sinks: Names (csv, tensorboard, wandb, mlflow, comet, trackio) or objects with a name and the methods of
            `MetricSink`; one or a list. `keeps_names` and `takes_back` are False where they have none.
        queue_capacity: Points that wait for a tracker at the most; of more, the newest are dropped.
        close_timeout: Seconds that the end of the run waits for all trackers together.
        names: Which names the trackers show: hf, bridge, or both; a dictionary says it for each.

    Raises:
        ConfigError: for a name that no tracker has, and an object that lacks a method.
    """

    __module__ = "onstep.callbacks.metric_sinks"  # by  which checkpoints know it

    ranks = "main"

    def __init__(
        self,
        sinks: Sinks,
        queue_capacity: int = 1000,
        close_timeout: float = 30.0,
        names: str | Names = (HF,),
    ) -> None:
        if queue_capacity < 1:
            raise ConfigError(f"queue_capacity must be at least 1 point, got {queue_capacity}.")
        if not close_timeout >= 0:
            raise ConfigError(f"close_timeout must be >= 0 seconds, got {close_timeout}; 0 does not wait at all.")
        self.queue_capacity = queue_capacity
        self.close_timeout = close_timeout
        chosen = names if isinstance(names, Mapping) else name_list(names, "names") or ()
        self._loggers = _loggers(sinks, queue_capacity, close_timeout, chosen)
        self._names = {name: _names_of(name, chosen) for name in self._loggers}
        self._points = RunPoints()
        self._memory: dict[str, Any] = {}
        """What is known of the run between its moments: `run`, `state` (Hugging Face's view), `resumed`."""

    @property
    def sinks(self) -> list[MetricSink]:
        """The trackers, in order."""
        return [logger.queue.sink for logger in self._loggers.values()]

    @property
    def tag_loggers(self) -> dict[str, TrackerLogger]:
        """The trackers that show Megatron Bridge's tags; the loop hands them over."""
        return {name: logger for name, logger in self._loggers.items() if BRIDGE in self._names[name]}

    @property
    def dropped(self) -> int:
        """Points that the trackers did not take, all trackers together."""
        return sum(queue.dropped for queue in self._queues)

    def on_train_start(self, context: CallbackContext) -> None:
        """Open the trackers, where the run continues or from the start."""
        resumed = self._memory.pop("resumed", None)
        step, run, before = context.trainer_state.global_step, _identity(context), self._memory.get("run")
        if resumed is not None:
            states = self._states_in(resumed, run)
        elif step == 0 and not self._has_evaluated_only():
            states = {}
        else:  # the trackers were closed, so they have what they were given
            is_same = step > 0 and before is not None and before.run_id == run.run_id
            states = self._states() if is_same else _of_another_run(self._states())
        if not states:
            self._points = RunPoints()
        self._begin(context, run, states)

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
        close_together(self._loggers.values(), context.reason or "completed", self.close_timeout)

    def state_dict(self) -> dict[str, Any]:
        """What continues the run in each tracker, and the points that a kill might take from one."""
        run, state = self._memory.get("run"), self._memory.get("state")
        return {
            "run_id": None if run is None else run.run_id,
            "step": None if state is None else state.global_step,
            "samples": _samples(self._memory.get("progress")),
            "shown": self._points.state_dict(),
            "sinks": self._states(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue a checkpoint's run when training begins; while training, go back to the checkpoint at once."""
        if not any(queue.is_open for queue in self._queues):
            self._memory["resumed"] = dict(state_dict)
            return
        run = replace(self._memory["run"], start_step=state_dict["step"] or 0)
        self._memory["run"] = run
        self._open(run, self._states_in(state_dict, run), state_dict.get("samples", 0))

    @property
    def _queues(self) -> list[SinkQueue]:
        return [queue for logger in self._loggers.values() for queue in logger.queues]

    def _has_evaluated_only(self) -> bool:
        """Whether what was sent so far is an evaluation of this run before its first step."""
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
            point = kept if getattr(logger.queue.sink, "keeps_names", False) else shown
            if HF in self._names[name] and point.metrics:
                logger.add(point.metrics, point.step, point.timestamp)

    def _open_to_add(self, context: CallbackContext) -> None:
        """Open the trackers for an evaluation outside of training, which adds to what there is."""
        run = replace(_identity(context), adds_only=True)
        resumed = self._memory.get("resumed")
        self._begin(context, run, self._states() if resumed is None else self._states_in(resumed, run))

    def _begin(self, context: CallbackContext, run: RunIdentity, states: Mapping[str, Any]) -> None:
        """Open the trackers, and remember whose they are."""
        progress = getattr(context.state, "train_state", None)
        self._memory |= {"run": run, "state": context.trainer_state, "progress": progress}
        self._open(run, states, _samples(progress))

    def _states(self) -> dict[str, Any]:
        return {name: logger.state_dict() for name, logger in self._loggers.items()}

    def _states_in(self, state_dict: Mapping[str, Any], run: RunIdentity) -> dict[str, Any]:
        """The trackers' states of a checkpoint, which says too what they show already.

        Of another run's, only the points: its runs in the trackers are not to be written to.
        """
        self._points = RunPoints(state_dict.get("shown", {}))
        states = dict(state_dict["sinks"])
        if "last_points" in state_dict:  # before version 0.5 all trackers shared them, under the journal's names
            points = [Point(**one) for one in state_dict["last_points"]]
            for name, logger in self._loggers.items():
                last = points_for(getattr(logger.queue.sink, "keeps_names", False), points)
                states[name] = {"sink": states.get(name, {}), "last": [plain_point(point) for point in last]}
        return states if state_dict.get("run_id") == run.run_id else _of_another_run(states)


def _loggers(sinks: Sinks, capacity: int, close_timeout: float, names: Names) -> dict[str, TrackerLogger]:
    """A logger for each sink, by its name; a second one of a name gets a number."""
    given = [sinks] if isinstance(sinks, str) or not isinstance(sinks, Sequence) else list(sinks)
    loggers: dict[str, TrackerLogger] = {}
    for one in given:
        sink = make_sink(one) if isinstance(one, str) else one
        check_sink(sink)
        name, number = sink.name, 2
        while name in loggers:
            name, number = f"{sink.name}-{number}", number + 1
        queue = SinkQueue(sink, capacity, close_timeout)
        if isinstance(sink, TensorBoardSink) and BRIDGE in _names_of(name, names):
            over_samples = SinkQueue(sink.beside(SAMPLES_FOLDER), capacity, close_timeout)
            loggers[name] = TrackerLogger(queue, over_samples=over_samples)
        else:
            loggers[name] = TrackerLogger(queue)
    return loggers


def _names_of(tracker: str, names: Names) -> tuple[str, ...]:
    return tuple(names[tracker] if isinstance(names, Mapping) else names)


def _identity(context: CallbackContext) -> RunIdentity:
    """The run that `context` is of: the run folder's, else one that its folder's path gives."""
    logging_dir, output_dir = (getattr(context.args, name, None) for name in ("logging_dir", "output_dir"))
    folder = Path(logging_dir or output_dir or "")
    run_folder, config = getattr(context.state, "run_folder", None), getattr(context.state, "cfg", None)
    places = [getattr(run_folder, "path", None), folder, output_dir]
    records = (run_record(Path(place)) for place in places if place is not None)
    record: dict[str, Any] = next((record for record in records if record), {})  # of the first `run.json`
    named = record.get("name") or getattr(context.args, "run_name", None) or folder.absolute().name
    return RunIdentity(
        name=str(named),
        run_id=str(record.get("run_id") or path_id(folder)),
        folder=folder,
        config=shown_config(config) if isinstance(config, ConfigContainer) else {},
        start_step=context.trainer_state.global_step,
    )


def shown_config(config: ConfigContainer) -> dict[str, Any]:
    """A configuration as trackers show it: of the environment variables the names only, as a value may be a key."""
    return {**config.to_dict(), "env_vars": sorted(config.env_vars)}


def _samples(progress: Any) -> int:
    """Samples that are done; 0 where the progress is another trainer's."""
    return getattr(progress, "consumed_train_samples", 0)


def _of_another_run(states: Mapping[str, Any]) -> dict[str, Any]:
    return {name: {**state, "sink": {}} for name, state in states.items()}
