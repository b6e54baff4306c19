"""The trackers that Megatron Bridge's tags go to: one logger each, on the last rank, behind a queue of its own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onstep.config import ConfigContainer
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.sinks import Point, RecentPoints, RunIdentity, SinkQueue, make_sink, plain_point
from onstep.sinks.reporting import tracker_options
from onstep.sinks.tracker_run import require_package

if TYPE_CHECKING:
    from onstep.training.state import GlobalState

TRACKERS = "trackers"
"""Name of the trackers among `GlobalState.rank_parts`, which checkpoints save."""

SAMPLES_FOLDER = "vs_samples"
"""Where in TensorBoard's folder the curves over samples are: a curve is continued by masking what lies beyond a place
on its axis, so two axes cannot share a folder."""

CLOSE_TIMEOUT = 30.0
"""Seconds that the end of a run waits for all trackers together."""

_REMEDY = (
    "Megatron Bridge's tags are not in the journal, so these points cannot be refilled; `onstep logs replay` fills a "
    "tracker with the journal's own metrics."
)
"""What there is to do about points that a tracker of these tags has missed."""

_SWITCHES = {
    "tensorboard": "tensorboard_dir",
    "wandb": "wandb_project",
    "mlflow": "mlflow_experiment",
    "comet": "comet_project",
}
"""The field of `logger` that asks for each tracker."""

_RUN_NAMES = {"wandb": "wandb_exp_name", "mlflow": "mlflow_run_name", "comet": "comet_experiment_name"}


def configured_trackers(cfg: ConfigContainer) -> tuple[str, ...]:
    """The trackers that a configuration asks for."""
    return tuple(name for name, switch in _SWITCHES.items() if getattr(cfg.logger, switch) is not None)


def check_trackers(cfg: ConfigContainer) -> None:
    """Refuse what cannot work, on all ranks alike, before anything is trained.

    Raises:
        ConfigError: a name that is empty, or a tracker whose package is not installed.
    """
    for name in configured_trackers(cfg):
        require_package(name)
        field = _RUN_NAMES.get(name)
        if field is not None and getattr(cfg.logger, field) == "":
            raise ConfigError(
                f"logger.{field} must not be empty; please specify the {name} experiment name, or leave it unset for "
                f"the run's."
            )


class TrackerLogger:
    """A tracker of a run. No method blocks, and none raises for the tracker's faults.

    Args:
        queue: where points go.
        clock: unix seconds.
    """

    def __init__(self, queue: SinkQueue, clock: Callable[[], float] = time.time) -> None:
        self.queue = queue
        self._clock = clock
        self._recent = RecentPoints()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a point to each curve, without a step at that of the last point.

        Tensors of one element are read by the queue's thread.
        """
        timestamp = self._clock()
        if step is None:
            step = max(self._recent.last_step, 0)
        self._recent.add(Point(dict(metrics), step, timestamp))
        self.queue.log(metrics, step, timestamp)
        self._recent.forget(self.queue.num_waiting)

    def log_metric(self, name: str, value: Any, step: int | None = None) -> None:
        """Add a point to a curve."""
        self.log_metrics({name: value}, step)

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """W&B's name for `log_metrics`."""
        self.log_metrics(metrics, step)

    def add_text(self, tag: str, text: str, step: int = 0) -> None:
        """Show a text."""
        self.queue.text(tag, text, step)

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Begin or continue the run; `state` is `state_dict()` of the checkpoint, {} for a fresh run."""
        self._recent = RecentPoints(Point(**one) for one in state.get("last", []))
        self.queue.open(replace(run, last_points=self._recent.kept), state.get("sink", {}))

    def state_dict(self) -> dict[str, Any]:
        """What continues the run: the tracker's ids and the points that a kill might take from it. Reads the device."""
        points = self._recent.unsettled(self.queue.num_waiting)
        return {"sink": self.queue.state_dict(), "last": [plain_point(point) for point in points]}

    def settle(self) -> None:
        """The tracker was closed, so it has what it was given: no more than the last step is given to it again."""
        self._recent = RecentPoints(self._recent.last)

    def flush(self) -> None:
        """For clients that call it; the queue's thread hands on what it gets at once."""

    @property
    def queues(self) -> list[SinkQueue]:
        """All queues of the tracker."""
        return [self.queue]

    def close(self, status: str = "completed") -> None:
        """Hand over what waits, for at most `CLOSE_TIMEOUT`."""
        close_together(self.queues, status)


class TensorBoardLogger(TrackerLogger):
    """TensorBoard, with a second run for the curves over consumed samples."""

    def __init__(self, queue: SinkQueue, over_samples: SinkQueue, clock: Callable[[], float] = time.time) -> None:
        super().__init__(queue, clock)
        self.over_samples = TrackerLogger(over_samples, clock)

    def add_scalar(self, tag: str, scalar_value: Any, global_step: int) -> None:
        """Add a point to a curve, as a `SummaryWriter` does; one whose tag ends in `vs samples` is over samples."""
        logger = self.over_samples if tag.endswith(" vs samples") else self
        logger.log_metrics({tag: scalar_value}, global_step)

    def add_points(
        self, over_steps: Mapping[str, Any], over_samples: Mapping[str, Any], step: int, samples: int
    ) -> None:
        """Add a point to many curves."""
        self.log_metrics(over_steps, step)
        if over_samples:
            self.over_samples.log_metrics(over_samples, samples)

    def settle(self) -> None:
        """Both runs have what they were given."""
        super().settle()
        self.over_samples.settle()

    @property
    def queues(self) -> list[SinkQueue]:
        """Both queues."""
        return [self.queue, self.over_samples.queue]


def close_together(queues: list[SinkQueue], status: str) -> None:
    """Close queues side by side: all of them together are waited for at most `CLOSE_TIMEOUT`."""
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for queue in queues:
        queue.begin_close(status)
    for queue in queues:
        queue.finish_close(deadline - time.monotonic())


class Trackers:
    """All trackers of a run. Only the last rank has any, where the configuration asks for them.

    Args:
        run_folder: the run's folder with its `run_id`, or None.
        clock: unix seconds.
    """

    def __init__(
        self,
        cfg: ConfigContainer,
        world: World,
        run_folder: Any = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cfg, self._world, self._run_folder, self._clock = cfg, world, run_folder, clock
        self._given: dict[str, Any] = {}
        self._own: dict[str, TrackerLogger] = {}
        self._states: dict[str, Any] = {}
        self._run_id = ""
        self._is_open = False
        self.is_held = False
        """Somebody closes them at the end of the run."""
        self.evaluated: dict[str, int] = {}
        """The step whose results were written last, for validation and test."""

    @property
    def configured(self) -> tuple[str, ...]:
        """The trackers that the configuration asks for, the same on all ranks."""
        return configured_trackers(self._cfg)

    @property
    def is_wanted(self) -> bool:
        """Whether any rank writes points: by the configuration, or by a logger that was put in place here."""
        return bool(self.configured or self._given)

    @property
    def loggers(self) -> dict[str, Any]:
        """The loggers of this rank by name; empty on all ranks but the last, unless put in place."""
        return {name: found for name in _SWITCHES if (found := self.get(name)) is not None}

    def get(self, name: str) -> Any:
        """A tracker's logger, made when it is first asked for; None where it is not configured, and on other ranks."""
        if name in self._given:
            return self._given[name]
        if name not in self._own and name in self.configured and self._world.rank == self._world.size - 1:
            self._own[name] = self._make(name)
        return self._own.get(name)

    def put(self, name: str, logger: Any) -> None:
        """Use another logger on this rank: an object with its own client's methods; None takes it out again."""
        self._given[name] = logger
        if logger is None:
            del self._given[name]

    def open(self, step: int, samples: int, adds_only: bool = False) -> None:
        """Begin or continue the runs, from a step on; nothing where they are open.

        Args:
            adds_only: for an evaluation outside of training, which takes nothing back.
        """
        if self._is_open:
            return
        check_trackers(self._cfg)
        self._is_open = True
        self.loggers  # noqa: B018 - makes them
        for name, logger in self._own.items():
            run = self._identity(name, step, adds_only)
            logger.open(run, self._states.get(name, {}))
            if isinstance(logger, TensorBoardLogger):
                second = replace(run, start_step=samples, config={})
                logger.over_samples.open(second, self._states.get(f"{name} {SAMPLES_FOLDER}", {}))

    def reopen(self, step: int, samples: int) -> None:
        """Go on from an earlier step: the run went back to a checkpoint, whose states were loaded here."""
        if self._is_open:
            self._is_open = False
            self.open(step, samples)

    def close(self, status: str) -> None:
        """Close what is open: completed, stopped, preempted or failed."""
        if not self._is_open:
            return
        close_together(self._queues, status)
        for logger in self._own.values():
            logger.settle()
        self._states = self._current_states()
        self._is_open = False

    def agree_on_run(self) -> None:
        """Give every rank the id that trackers know the run by, so that any number of ranks can continue it.

        Collective.
        """
        if self.configured:
            self._run_id = self._world.share(self._stable_id(), source=self._world.size - 1)

    def state_dict(self) -> dict[str, Any]:
        """What continues the runs: each rank its own, of which only the last has more than the run's id."""
        return {"run_id": self._run_id, "evaluated": dict(self.evaluated), "trackers": self._current_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the runs of a checkpoint, when they are opened."""
        self._take_over(state_dict)

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        if self._run_folder is None and not self._is_fork:
            self._run_id = state_dict["run_id"]
        self.evaluated = dict(state_dict["evaluated"])
        self._states = dict(state_dict["trackers"])

    @property
    def dropped(self) -> int:
        """Points that trackers of this rank did not take."""
        return sum(queue.dropped for queue in self._queues)

    @property
    def _queues(self) -> list[SinkQueue]:
        return [queue for logger in self._own.values() for queue in logger.queues]

    @property
    def _is_fork(self) -> bool:
        """Whether the run starts from a checkpoint of another one, whose trackers it must leave alone."""
        checkpoint = self._cfg.checkpoint
        if checkpoint.load is None:
            return False
        return checkpoint.save is None or Path(checkpoint.load).resolve() != Path(checkpoint.save).resolve()

    def _current_states(self) -> dict[str, Any]:
        states = dict(self._states)
        if self._is_open:
            for name, logger in self._own.items():
                states[name] = logger.state_dict()
                if isinstance(logger, TensorBoardLogger):
                    states[f"{name} {SAMPLES_FOLDER}"] = logger.over_samples.state_dict()
        return states

    def _make(self, name: str) -> TrackerLogger:
        capacity = self._cfg.logger.tensorboard_queue_size
        queue = SinkQueue(make_sink(name, **self._options(name)), capacity=capacity, remedy=_REMEDY)
        if name != "tensorboard":
            return TrackerLogger(queue, self._clock)
        folder = Path(self._cfg.logger.tensorboard_dir or "") / SAMPLES_FOLDER
        over_samples = SinkQueue(make_sink(name, log_dir=folder), capacity=capacity, remedy=_REMEDY)
        return TensorBoardLogger(queue, over_samples, self._clock)

    def _options(self, name: str) -> dict[str, Any]:
        logger = self._cfg.logger
        return {"log_dir": logger.tensorboard_dir} if name == "tensorboard" else tracker_options(name, logger)

    def _identity(self, name: str, start: int, adds_only: bool) -> RunIdentity:
        cfg = self._cfg
        field = _RUN_NAMES.get(name)
        run_name = getattr(cfg.logger, field) if field is not None else None
        folder = Path(cfg.logger.logging_dir or ".") if self._run_folder is None else Path(self._run_folder.path)
        return RunIdentity(
            name=run_name or cfg.run.name or cfg.run.recipe or "onstep",
            run_id=self._stable_id(),
            folder=folder,
            config={**cfg.to_dict(), "env_vars": sorted(cfg.env_vars)},  # names only: a value may be a key
            start_step=start,
            adds_only=adds_only,
        )

    def _stable_id(self) -> str:
        """The run's id with an ending of its own: `report_to` may send other names to the same tracker."""
        if not self._run_id:
            known = self._run_folder.run_id if self._run_folder is not None else ""
            self._run_id = f"{known or uuid.uuid4().hex[:12]}-bridge"
        return self._run_id


@contextmanager
def closing_trackers(state: GlobalState) -> Iterator[None]:
    """Close the trackers at the end of the block, as the run ended; nested blocks leave that to the outermost."""
    trackers = state.trackers
    if trackers.is_held:
        yield
        return
    trackers.is_held, status = True, "failed"
    try:
        yield
        status = "completed"
    finally:
        trackers.is_held = False
        trackers.close(state.ended or status)
