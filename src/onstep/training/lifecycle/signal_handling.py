"""Handles signals that ask a run to save and exit, and abandons the wait for data that they interrupt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from onstep.data import StepBatches
from onstep.training.feature import Feature
from onstep.training.lifecycle.data_timeout import DataTimeout, DataWait
from onstep.training.run import Run
from onstep.training.runs.signals import DistributedSignalHandler
from onstep.training.stages.ending import give_up_on_data
from onstep.training.stages.job import Job

logger = logging.getLogger(__name__)

Read = Callable[[], StepBatches | None]


class SignalHandling(Feature[Run]):
    """Turns `train.exit_signals` into a request to save and exit, during the run."""

    name = "signals"
    when = "train.exit_signal_handler"

    @classmethod
    def wanted(cls, host: Run) -> bool:
        return host.cfg.train.exit_signal_handler and host.exits.handler is None

    @contextmanager
    def session(self) -> Iterator[None]:
        run = self.host
        with DistributedSignalHandler(run.cfg.train.exit_signals) as handler:
            run.exits.handler = handler
            try:
                yield
            finally:
                run.exits.handler = None


class DataTimeoutGuard(Feature[Job]):
    """Gives up on a batch that does not arrive after a signal, so that the run can exit."""

    name = "data_timeout"
    when = "train.exit_signal_handler, train.data_timeout"

    @classmethod
    def wanted(cls, host: Job) -> bool:
        return host.run.exits.handler is not None

    def wrap_read(self, read: Read) -> Read:
        run = self.host.run
        wait = DataWait(read, run.exits.handler, run.cfg.train.data_timeout)

        def guarded() -> StepBatches | None:
            try:
                return wait()
            except DataTimeout as timeout:
                logger.warning("%s", timeout)
                give_up_on_data(self.host)
                return None

        return guarded
