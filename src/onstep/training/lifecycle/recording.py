"""Opens and closes the record of a run, with a line about each start and each end of a process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from onstep.errors import ConfigError
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
            start = {"run_id": run.run_dir.run_id, "num_ranks": run.world.size}
            run.record.begin(run.run_dir.path, run.train_state.step, run.trainer_state.epoch, start)
