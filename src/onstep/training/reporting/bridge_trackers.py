"""Manages the trackers that receive Megatron Bridge's tags: those of `TrackersCallback`, or else the last rank's
own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from onstep.config import ConfigContainer
from onstep.config.trackers import BRIDGE_FIELDS
from onstep.distributed import World
from onstep.errors import ConfigError
from onstep.events import CallbackManager
from onstep.record import Record
from onstep.record.history import BRIDGE_KEY
from onstep.record.kinds import Kind
from onstep.trackers import RunIdentity, TrackerFeed, make_tracker, tracker_class
from onstep.trackers.metric_names import BRIDGE
from onstep.trackers.numbers import saved_mapping
from onstep.trackers.report_to import asked_names, tracker_options
from onstep.trackers.tag_record import TagRecord
from onstep.trackers.tracker import require_package
from onstep.trackers.tracker_logger import TrackerLogger, close_together
from onstep.trackers.trackers_callback import shown_config
from onstep.training.protocols import Loggers, StateDict
from onstep.training.reporting.loss_accumulator import read_together
from onstep.training.runs.run_dir import RunDir


def configured_trackers(cfg: ConfigContainer) -> tuple[str, ...]:
    """The trackers that are configured to show Megatron Bridge's tags."""
    return tuple(name for name, names in asked_names(cfg.logger).items() if BRIDGE in names)


def check_trackers(cfg: ConfigContainer) -> None:
    """Reject configurations that cannot work, on all ranks alike, before any training.

    Raises:
        ConfigError: for an empty name, or a tracker whose package is not installed.
    """
    for name in configured_trackers(cfg):
        kind = tracker_class(name)
        require_package(name, kind.package)
        if tracker_options(name, cfg.logger).get("run_name") == "":
            raise ConfigError(
                f"{kind.options['run_name'][-1]} must not be empty; set the {name} experiment name, or leave it unset "
                f"to use the run's name."
            )


_MOST_UNLOGGED = 100
"""Steps whose tags wait for the record where no step is logged."""


class Recorded(Protocol):
    """The part of a `Run` that its record is read from and written by."""

    @property
    def record_path(self) -> Path | None: ...

    def note(self, kind: Kind, data: Mapping[str, Any], step: int | None = None) -> None: ...


class BridgeTrackers:
    """All trackers of a run. Only the last rank has any, if configured.

    Args:
        run_dir: the run's directory with its `run_id`, or None.
        clock: Unix time in seconds.
        recording: what has the record of the run; None for trackers without one.
    """

    def __init__(
        self,
        cfg: ConfigContainer,
        world: World,
        run_dir: RunDir | None = None,
        clock: Callable[[], float] = time.time,
        recording: Recorded | None = None,
    ) -> None:
        self._cfg, self._world, self._run_dir, self._clock = cfg, world, run_dir, clock
        self.recording = recording
        """The run whose record has the tags; an evaluation after training is one of its own."""
        self._noted: dict[str, Any] = {}
        """Tags that are in the record of the run already."""
        self._given: dict[str, object] = {}
        self._own: dict[str, TrackerLogger] = {}
        self._shared: dict[str, TrackerLogger] = {}
        """The trackers of the callback that feeds trackers, so that a tracker has one run for all names."""
        self._states: StateDict = {}
        self._run_id = ""
        self._is_open = False
        self._recipients: Loggers | None = None
        """The recipients of the tags, known once the trackers' runs are open."""
        self.is_held = False
        """Whether something closes the trackers at the end of the run."""
        self.evaluated: dict[str, int] = {}
        """The step of the last written results, for validation and test."""
        self.record = TagRecord(_read, clock)
        """The tags since the last logged step; on rank 0, which writes the record and the metrics log."""

    def join(self, callbacks: CallbackManager | None) -> None:
        """Pass the tags to a callback that feeds trackers and shows tags too (`TrackersCallback`), on rank 0."""
        for callback in callbacks.callbacks if callbacks is not None else ():
            self._shared |= getattr(callback, "tag_loggers", {})
        self._recipients = None

    @property
    def configured(self) -> tuple[str, ...]:
        """The trackers that are configured to show the tags; the same on all ranks."""
        return configured_trackers(self._cfg)

    @property
    def is_wanted(self) -> bool:
        """Whether any rank writes points: by configuration, by a callback, or to a logger that was installed here."""
        return bool(self.configured or self._given or self._shared)

    @property
    def loggers(self) -> Loggers:
        """The loggers of this rank by name; empty except on the rank that writes, unless installed explicitly."""
        names = dict.fromkeys((*BRIDGE_FIELDS, *self.configured, *self._shared))
        return {name: found for name in names if (found := self.get(name)) is not None}

    @property
    def recipients(self) -> Loggers:
        """The recipients of the tags on this rank: its loggers, and on rank 0 the metrics log's record."""
        if self._recipients is None or not self._is_open:
            is_kept = self._world.is_main and self.is_wanted and (self._cfg.logger.log_interval or self._has_record)
            told = {name: one for name, one in self.loggers.items() if not _reads_record(one)}
            self._recipients = {**told, **({"journal": self.record} if is_kept else {})}
        return self._recipients

    def get(self, name: str) -> Any:
        """A tracker's logger, created on first use; None if it is not configured, and on other ranks.

        A tracker that also shows the metrics log's metrics is written to by rank 0, which has them; else by the last
        rank.
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
        """Install another logger on this rank: an object with its own client's methods; None removes it."""
        self._given[name], self._recipients = logger, None
        if logger is None:
            del self._given[name]

    def open(self, step: int, samples: int, adds_only: bool = False) -> None:
        """Begin or continue the trackers' runs from a step; does nothing if they are open.

        Args:
            adds_only: for an evaluation outside of training, which removes no earlier points.
        """
        if self._is_open:
            return
        check_trackers(self._cfg)
        self._is_open, self._recipients = True, None
        self.loggers  # noqa: B018 - makes them
        for name, logger in self._own.items():
            self._open(name, logger, step, samples, adds_only)

    def _open(self, name: str, logger: TrackerLogger, step: int, samples: int, adds_only: bool = False) -> None:
        if name in self._states:
            logger.load_state_dict(self._states.pop(name), run_id=self._run_id, step=step, samples=samples)
        run, recording = self._identity(name, step, adds_only), self.recording
        record = None if recording is None else recording.record_path
        append = None if recording is None else partial(_append_to, recording)
        logger.open(run, record, append, is_new=step == 0 and not adds_only)

    def reopen(self, step: int, samples: int) -> None:
        """Continue from an earlier step: the run was rolled back to a checkpoint, whose states were loaded here."""
        if not self._is_open:
            return
        for name, logger in self._own.items():
            if logger.reads_record:
                logger.feed.wake()
            else:
                self._open(name, logger, step, samples)

    def close(self, status: str) -> None:
        """Close the open trackers as completed, stopped, preempted or failed."""
        if not self._is_open:
            return
        self.note_tags(reads=status != "failed")
        close_together(self._own.values(), status)
        self.record.clear()
        self._noted = {}
        self._is_open = False

    @property
    def _has_record(self) -> bool:
        return self.recording is not None and self.recording.record_path is not None

    def note_unlogged_tags(self) -> None:
        """Append the tags to the record of the run from time to time, where no step is logged that would bring them."""
        if not self._cfg.logger.log_interval and len(self.record) >= _MOST_UNLOGGED and self.recording is not None:
            self.recording.note("tags", {BRIDGE_KEY: self.record.take()})

    def note_tags(self, reads: bool) -> None:
        """Append the tags that no logged step follows to the record of the run, once, for the trackers that read it.

        Args:
            reads: Whether values that are still on the device are read; after a failure that might fail, too.
        """
        tags = self.record.columns(reads)
        if self.recording is not None and self._has_record and tags and tags != self._noted:
            self.recording.note("tags", {BRIDGE_KEY: tags})
            self._noted = tags

    @contextmanager
    def held(self, ended: Callable[[], str | None]) -> Iterator[None]:
        """Close the trackers at the end of the block; nested blocks leave that to the outermost.

        Args:
            ended: returns how the run ended, if known; else the outcome of the block counts.
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
        """Share the id under which trackers know the run with every rank, so that any number of ranks can continue it.

        Collective.
        """
        if self.configured:
            self._run_id = self._world.share(self._stable_id(), source=self._world.size - 1)

    def state_dict(self) -> StateDict:
        """The state that continues the trackers' runs: per rank, but only the last one has more than the run's id."""
        return {"run_id": self._run_id, "trackers": self._current_states()}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue a checkpoint's trackers' runs once they are opened."""
        checkpoint = self._cfg.checkpoint
        places = [None if one is None else Path(one).resolve() for one in (checkpoint.load, checkpoint.save)]
        is_fork = checkpoint.load is not None and places[0] != places[1]  # its trackers must not be touched
        if self._run_dir is None and not is_fork:
            self._run_id = str(state_dict["run_id"])
        where = "the checkpoint's state of the trackers of Megatron Bridge's tags"
        saved = saved_mapping(state_dict, "trackers", where)
        self._states = {name: saved_mapping(saved, name, where) for name in saved}

    def make_durable(self) -> None:
        """Fsync the local files of this rank's own trackers."""
        for logger in self._own.values():
            logger.make_durable()

    def _current_states(self) -> StateDict:
        return self._states | {name: logger.state_dict() for name, logger in self._own.items()}

    def _make(self, name: str) -> TrackerLogger:
        options = tracker_options(name, self._cfg.logger)
        return TrackerLogger(TrackerFeed(make_tracker(name, **options), names=(BRIDGE,)), self._clock)

    def _identity(self, name: str, start: int, adds_only: bool) -> RunIdentity:
        cfg = self._cfg
        run_name = tracker_options(name, cfg.logger).get("run_name")
        directory = Path(cfg.logger.logging_dir or ".") if self._run_dir is None else Path(self._run_dir.path)
        return RunIdentity(
            name=run_name or cfg.run.name or cfg.run.recipe or "onstep",
            run_id=self._stable_id(),
            directory=directory,
            config=shown_config(cfg),
            start_step=start,
            adds_only=adds_only,
        )

    def _stable_id(self) -> str:
        """The run's id with a distinct suffix: `report_to` may send other names to the same tracker."""
        if not self._run_id:
            known = self._run_dir.run_id if self._run_dir is not None else ""
            self._run_id = f"{known or uuid.uuid4().hex[:12]}-bridge"
        return self._run_id


def _read(values: Sequence[object]) -> Sequence[object]:
    return list(read_together(dict(enumerate(values))).values())


def _reads_record(logger: object) -> bool:
    return isinstance(logger, TrackerLogger) and logger.reads_record


def _append_to(recording: Recorded, data: Record, step: int) -> None:
    recording.note("tracker", data, step)
