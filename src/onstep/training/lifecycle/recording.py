"""Opens and closes the record of a run, with a line about each start and each end of a process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onstep.analysis.logs.run_status import run_record
from onstep.errors import ConfigError
from onstep.record import Record
from onstep.record.history import history_of
from onstep.training.feature import Feature
from onstep.training.run import Run

logger = logging.getLogger(__name__)


class Recording(Feature[Run]):
    """Opens the record when training begins, with a line about the start, and closes it with one about the end."""

    name = "record"
    when = "a run with a directory"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        """Whether the run has a directory."""
        return host.run_dir is not None

    def __init__(self, host: Run) -> None:
        super().__init__(host)
        self._has_begun = False

    @contextmanager
    def session(self) -> Iterator[None]:
        self.host.record.is_held = True
        try:
            yield
        finally:
            if self._has_begun:
                self._note_end()
            self.host.record.close()

    def _note_end(self) -> None:
        ending = self.host.ending
        try:
            self.host.note("end", {"reason": ending.ended, "error": ending.error})
        except ConfigError as error:  # the directory is gone
            logger.warning("the record does not say how the run ended: %s", error)

    def opening(self) -> None:
        run = self.host
        self._has_begun = True
        if run.run_dir is not None and run.world.is_main:
            start: dict[str, Any] = {"num_ranks": run.world.size}
            if (origin := run_record(run.run_dir.path).get("forked_from")) is not None:
                start["forked_from"] = origin
            progress, history = run.train_state, run.info.history
            read = run.record.begin(run.run_dir.path, progress.step, run.trainer_state.epoch, start)
            has_all = run.record.num_reported >= history.num_saved
            if read is not None and progress.step > 0 and has_all and history.num_saved > len(history):
                history.begin_with(history.num_saved, lambda: _history(read()))


def _history(lines: list[Record] | None) -> list[Record] | None:
    """The lines with metrics in the form of `log_history`; None, with a warning, if they are lost."""
    if lines is None:
        logger.warning("state.log_history lacks the records before the resume: the record no longer begins with them")
        return None
    return history_of(lines)
