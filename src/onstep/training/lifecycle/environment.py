"""Sets up the environment of a run: environment variables, log level and trackers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from onstep.events import Request
from onstep.training.feature import Feature
from onstep.training.reporting.bridge_trackers import BridgeTrackers
from onstep.training.run import Run

logger = logging.getLogger(__name__)


class EnvironmentVariables(Feature[Run]):
    """Sets the configured environment variables that are not already set."""

    name = "environment"
    when = "env_vars"

    def session(self) -> AbstractContextManager[object]:
        is_main = os.environ.get("RANK", "0") == "0"  # the ranks have not met yet
        for name, value in self.host.cfg.env_vars.items():
            if os.environ.setdefault(name, value) != value and is_main:  # not shown: it may be a secret
                logger.warning("env_vars.%s has no effect: the environment of the process has another value", name)
        return nullcontext()


class LogLevel(Feature[Run]):
    """Sets the level of Onstep's own log messages."""

    name = "log_level"
    when = "logger.logging_level"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return host.cfg.logger.logging_level is not None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Set the level, and restore it at the end: the process may run more than one training."""
        log = logging.getLogger("onstep")
        before = log.level
        log.setLevel(self.host.cfg.logger.logging_level or logging.NOTSET)
        try:
            yield
        finally:
            log.setLevel(before)


class TrackerSessions(Feature[Run]):
    """Opens the trackers that show Megatron Bridge's tags alone when training begins, and closes them at the end.

    `TrackersCallback` has the others.
    """

    name = "trackers"
    when = "always; logger.report_to, logger.tensorboard_dir and the like select the trackers"
    collective = True
    per_rank = True

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self.has_state = bool(host.bridge_trackers.configured)

    def session(self) -> AbstractContextManager[object]:
        """Close the trackers at the end."""
        return self.host.bridge_trackers.held(lambda: self.host.ending.ended)

    def opening(self) -> None:
        """Share the run's id with every rank, and open the trackers, which callbacks use from `on_train_start` on.

        Collective.
        """
        trackers, progress = self.host.bridge_trackers, self.host.train_state
        trackers.agree_on_run()
        trackers.open(progress.step, progress.consumed_train_samples)

    def rolled_back(self, bad_step: int, request: Request) -> None:
        """Continue from the step of the checkpoint."""
        progress = self.host.train_state
        self.host.bridge_trackers.reopen(progress.step, progress.consumed_train_samples)

    @property
    def stateful(self) -> BridgeTrackers:
        """The trackers, whose state lets their runs continue."""
        return self.host.bridge_trackers
