"""Keeps a rank alive under the SIGTERM of a launcher that has lost another rank, until that rank is reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from onstep.processes.heartbeat import HEARTBEAT
from onstep.training.run import Run
from onstep.training.runs.signals import REPEAT_WINDOW_SECONDS
from onstep.training.watchdog.rank_report import TERMINATED
from onstep.training.watchdog.watchdog import Watching


@contextmanager
def reports_before_sigterm(run: Run) -> Iterator[None]:
    """While entered, SIGTERM ends this process at once, unless another rank is gone: the watchdog then ends it.

    A second SIGTERM ends it in any case. With a single rank, with a handler of the user, or with
    `train.exit_signal_handler=false`, nothing changes.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_wanted = run.world.size > 1 and run.cfg.train.exit_signal_handler and is_main
    if not is_wanted or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    handler = _Handler(run)
    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Handler:
    """Handles SIGTERM between two bytecodes of the main thread, without locks."""

    def __init__(self, run: Run) -> None:
        self._run, self._pid = run, os.getpid()
        self._kept_at: float | None = None
        """When the first signal came, if this process outlived it."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        is_child = os.getpid() != self._pid
        watching = None if is_child else self._run.features.find(Watching)
        is_second = self._kept_at is not None and time.monotonic() - self._kept_at > REPEAT_WINDOW_SECONDS
        if watching is not None and not is_second and watching.has_lost_rank():
            self._kept_at = self._kept_at or time.monotonic()
            return
        if not is_child:
            HEARTBEAT.activity = TERMINATED  # for the other ranks
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
