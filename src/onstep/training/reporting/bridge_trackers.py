"""The trackers that Megatron Bridge's tags go to: those of `MetricSinks`, or else the last rank's own."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from onstep.config import ConfigContainer
from onstep.config.reporting import BRIDGE_FIELDS
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.trackers import RunIdentity, SinkQueue, make_sink
from onstep.trackers.metric_names import BRIDGE
from onstep.trackers.report_to import asked_names, tracker_options
from onstep.trackers.tag_record import TagRecord
from onstep.trackers.tracker import require_package
from onstep.trackers.tracker_logger import SAMPLES_FOLDER, TrackerLogger, close_together
from onstep.trackers.trackers_callback import shown_config
from onstep.training.protocols import Loggers, StateDict
from onstep.training.reporting.loss_accumulator import read_together
from onstep.training.runs.run_dir import RunFolder

_REMEDY = "A journal (JsonLogger) has these tags too: `onstep logs replay RUN --to NAME` fills a tracker with them."
"""What there is to do about points that a tracker of these tags has missed."""

_RUN_NAMES = {"wandb": "wandb_exp_name", "mlflow": "mlflow_run_name", "comet": "comet_experiment_name"}


def configured_trackers(cfg: ConfigContainer) -> tuple[str, ...]:
    """The trackers that are to show Megatron Bridge's tags."""
    return tuple(name for name, names in asked_names(cfg.logger).items() if BRIDGE in names)


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
        run_folder: RunFolder | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cfg, self._world, self._run_folder, self._clock = cfg, world, run_folder, clock
        self._given: dict[str, object] = {}
        self._own: dict[str, TrackerLogger] = {}
        self._shared: dict[str, TrackerLogger] = {}
        """Those of the callback that fills trackers, by which a tracker has one run for all names."""
        self._states: StateDict = {}
        self._run_id = ""
        self._is_open = False
        self._takers: Loggers | None = None
        """Who gets the tags, known once the runs are open."""
        self.is_held = False
        """Somebody closes them at the end of the run."""
        self.evaluated: dict[str, int] = {}
        """The step whose results were written last, for validation and test."""
        self.record = TagRecord(_read, clock)
        """The tags since the journal's last record; on rank 0, where the journal is."""

    def join(self, callbacks: CallbackManager | None) -> None:
        """Hand the tags over to a callback that fills trackers and shows them too (`MetricSinks`), on rank 0."""
        for callback in callbacks.callbacks if callbacks is not None else ():
            self._shared |= getattr(callback, "tag_loggers", {})
        self._takers = None

    @property
    def configured(self) -> tuple[str, ...]:
        """The trackers that are to show the tags by the configuration, the same on all ranks."""
        return configured_trackers(self._cfg)

    @property
    def is_wanted(self) -> bool:
        """Whether any rank writes points: by the configuration, a callback, or a logger that was put in place here."""
        return bool(self.configured or self._given or self._shared)

    @property
    def loggers(self) -> Loggers:
        """The loggers of this rank by name; empty on all ranks but the one that writes, unless put in place."""
        names = dict.fromkeys((*BRIDGE_FIELDS, *self.configured, *self._shared))
        return {name: found for name in names if (found := self.get(name)) is not None}

    @property
    def takers(self) -> Loggers:
        """Who gets the tags on this rank: its loggers, and on rank 0 the journal's record."""
        if self._takers is None or not self._is_open:
            is_kept = self._world.is_main and self.is_wanted and self._cfg.logger.log_interval
            self._takers = {**self.loggers, **({"journal": self.record} if is_kept else {})}
        return self._takers

    def get(self, name: str) -> Any:
        """A tracker's logger, made when it is first asked for; None where it is not configured, and on other ranks.

        A tracker that shows the journal's metrics too is filled by rank 0, where those are; else by the last rank.
        """
        if name in self._given:
            return self._given[name]
        if name in self._shared:
            return self._shared[name] if self._world.is_main else None
        is_last = self._world.rank == self._world.size - 1
        if name not in self._own and name in self.configured and is_last:
            self._own[name] = self._make(name)
        return self._own.get(name)

    def put(self, name: str, logger: object) -> None:
        """Use another logger on this rank: an object with its own client's methods; None takes it out again."""
        self._given[name], self._takers = logger, None
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
        self._is_open, self._takers = True, None
        self.loggers  # noqa: B018 - makes them
        for name, logger in self._own.items():
            logger.open(self._identity(name, step, adds_only), self._states.get(name, {}), samples)

    def reopen(self, step: int, samples: int) -> None:
        """Go on from an earlier step: the run went back to a checkpoint, whose states were loaded here."""
        if self._is_open:
            self._is_open = False
            self.open(step, samples)

    def close(self, status: str) -> None:
        """Close what is open: completed, stopped, preempted or failed."""
        if not self._is_open:
            return
        close_together(self._own.values(), status)
        self._states = self._current_states()
        self._is_open = False

    @contextmanager
    def held(self, ended: Callable[[], str | None]) -> Iterator[None]:
        """Close the trackers at the end of the block; nested blocks leave that to the outermost.

        Args:
            ended: how the run ended, where it says; else as the block did.
        """
        if self.is_held:
            yield
            return
        self.is_held, status = True, "failed"
        try:
            yield
            status = "completed"
        finally:
            self.is_held = False
            self.close(ended() or status)

    def agree_on_run(self) -> None:
        """Give every rank the id that trackers know the run by, so that any number of ranks can continue it.

        Collective.
        """
        if self.configured:
            self._run_id = self._world.share(self._stable_id(), source=self._world.size - 1)

    def state_dict(self) -> StateDict:
        """What continues the runs: each rank its own, of which only the last has more than the run's id."""
        return {"run_id": self._run_id, "evaluated": dict(self.evaluated), "trackers": self._current_states()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the runs of a checkpoint, when they are opened."""
        checkpoint = self._cfg.checkpoint
        places = [None if one is None else Path(one).resolve() for one in (checkpoint.load, checkpoint.save)]
        is_fork = checkpoint.load is not None and places[0] != places[1]  # its trackers must be left alone
        if self._run_folder is None and not is_fork:
            self._run_id = state_dict["run_id"]
        self.evaluated = dict(state_dict["evaluated"])
        self._states = states = dict(state_dict["trackers"])
        for key in [key for key in states if key.endswith(f" {SAMPLES_FOLDER}")]:  # as older checkpoints have it
            states[key.removesuffix(f" {SAMPLES_FOLDER}")][SAMPLES_FOLDER] = states.pop(key)

    @property
    def dropped(self) -> int:
        """Points that trackers of this rank did not take."""
        return sum(queue.dropped for logger in self._own.values() for queue in logger.queues)

    def _current_states(self) -> StateDict:
        own = self._own if self._is_open else {}
        return self._states | {name: logger.state_dict() for name, logger in own.items()}

    def _make(self, name: str) -> TrackerLogger:
        capacity, options = self._cfg.logger.tensorboard_queue_size, tracker_options(name, self._cfg.logger)
        queue = SinkQueue(make_sink(name, **options), capacity=capacity, remedy=_REMEDY)
        if name != "tensorboard":
            return TrackerLogger(queue, self._clock)
        over_samples = SinkQueue(make_sink(name, **options, part=SAMPLES_FOLDER), capacity=capacity, remedy=_REMEDY)
        return TrackerLogger(queue, self._clock, over_samples)

    def _identity(self, name: str, start: int, adds_only: bool) -> RunIdentity:
        cfg = self._cfg
        run_name = tracker_options(name, cfg.logger).get("run_name")
        folder = Path(cfg.logger.logging_dir or ".") if self._run_folder is None else Path(self._run_folder.path)
        return RunIdentity(
            name=run_name or cfg.run.name or cfg.run.recipe or "onstep",
            run_id=self._stable_id(),
            folder=folder,
            config=shown_config(cfg),
            start_step=start,
            adds_only=adds_only,
        )

    def _stable_id(self) -> str:
        """The run's id with an ending of its own: `report_to` may send other names to the same tracker."""
        if not self._run_id:
            known = self._run_folder.run_id if self._run_folder is not None else ""
            self._run_id = f"{known or uuid.uuid4().hex[:12]}-bridge"
        return self._run_id


def _read(values: Sequence[object]) -> Sequence[object]:
    return list(read_together(dict(enumerate(values))).values())
