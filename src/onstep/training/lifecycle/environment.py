"""What a run sets around itself: environment variables, the level of its log, its trackers."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from onstep.training.feature import Feature
from onstep.training.protocols import StateDict
from onstep.training.run import Run


class EnvironmentVariables(Feature[Run]):
    """Sets the configured environment variables, unless they are set already."""

    name = "environment"
    when = "env_vars"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return bool(host.cfg.env_vars)

    def session(self) -> AbstractContextManager[object]:
        for name, value in self.host.cfg.env_vars.items():
            os.environ.setdefault(name, value)
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
        """Set it, and put it back at the end: a process may run others."""
        log = logging.getLogger("onstep")
        before = log.level
        log.setLevel(self.host.cfg.logger.logging_level or logging.NOTSET)
        try:
            yield
        finally:
            log.setLevel(before)


class TrackerSessions(Feature[Run]):
    """Opens the trackers where training begins, and closes them as the run ended."""

    name = "trackers"
    when = "always; logger.report_to, logger.tensorboard_dir and the like say which trackers"
    collective = True
    per_rank = True

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Always: a callback may put a tracker in place later."""
        return True

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self.has_state = bool(host.trackers.configured)

    def session(self) -> AbstractContextManager[object]:
        """Close them at the end."""
        return self.host.trackers.held(lambda: self.host.ending.ended)

    def begin(self) -> None:
        """Give every rank the id of the run, and open the trackers. Collective."""
        trackers, progress = self.host.trackers, self.host.train_state
        trackers.agree_on_run()
        trackers.open(progress.step, progress.consumed_train_samples)

    def rolled_back(self) -> None:
        """Go on from the step of the checkpoint."""
        progress = self.host.train_state
        self.host.trackers.reopen(progress.step, progress.consumed_train_samples)

    def state_dict(self) -> StateDict:
        """What continues the trackers' runs."""
        return self.host.trackers.state_dict()

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue them when they are opened."""
        self.host.trackers.load_state_dict(dict(state_dict))
