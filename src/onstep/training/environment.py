"""Environment variables and the log level of a run, set before anything is built."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from onstep.training.feature import Feature
from onstep.training.run import Run


class EnvironmentVariables(Feature[Run]):
    """Sets the configured environment variables, unless they are set already."""

    name = "environment"
    when = "env_vars"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Whether there are any."""
        return bool(host.cfg.env_vars)

    def session(self) -> AbstractContextManager[Any]:
        """Set them."""
        for name, value in self.host.cfg.env_vars.items():
            os.environ.setdefault(name, value)
        return nullcontext()


class LogLevel(Feature[Run]):
    """Sets the level of Onstep's own log messages."""

    name = "log_level"
    when = "logger.logging_level"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Whether a level is configured."""
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
