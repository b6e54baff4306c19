"""Waits for the last upload of a mirrored run: a first signal is answered, a second one leaves the upload."""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from onstep.config.sections.training import TrainingConfig
from onstep.mirror.mirror import Mirror
from onstep.slurm.allocation import Allocation
from onstep.training.runs.signals import REPEAT_WINDOW_SECONDS, DistributedSignalHandler, repeat_window_seconds

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_SOON_SECONDS, _RARELY_SECONDS = 3.0, 60.0
"""After which an upload that lasts says how much is left, and how often then."""
_LEAST_SECONDS = 15.0
"""Of an allocation, that are left when the upload is left; half the margin, if that is less."""


def finish_upload(mirror: Mirror, train: TrainingConfig) -> bool:
    """Upload what is left of a run; False if signals, or the end of the SLURM allocation, have ended that before.

    Args:
        mirror: of the run; its `unfinished` says what is not there.
        train: the run's configuration.
    """
    with signals_kept(train) as signals:
        closed, leave_at = mirror.begin_to_close(), _time_to_leave(train)
        began, words_at, answered = time.monotonic(), _SOON_SECONDS, 0
        try:
            while not closed.wait(_LOOK_SECONDS):
                names = [one.name for one in signals.received]
                reason = f"a second signal, {names[1]}" if len(names) > 1 else None
                if leave_at is not None and time.time() >= leave_at:
                    reason = "the end of the SLURM job"
                if reason is not None:
                    mirror.leave()
                    logger.warning("the last upload is left because of %s: %s", reason, mirror.unfinished)
                    return mirror.unfinished is None
                if answered < len(names):
                    answered = len(names)
                    logger.warning(
                        "received %s: the last upload to %s continues; left: %s%s",
                        names[0],
                        mirror.bucket.url,
                        mirror.due,
                        "" if repeat_window_seconds() == math.inf else "; a second signal leaves it to the next start",
                    )
                elif time.monotonic() - began > words_at:
                    words_at += _RARELY_SECONDS
                    logger.info("uploading what is left of the run to %s: %s", mirror.bucket.url, mirror.due)
        except KeyboardInterrupt:  # signals are not handled
            mirror.leave()
            logger.warning("the last upload is left: %s", mirror.unfinished)
            raise
    return True


def _time_to_leave(train: TrainingConfig) -> float | None:
    """When an upload must have ended, in seconds since the epoch; None outside of SLURM or without a margin."""
    allocation, margin = Allocation.of_process(), train.exit_margin_seconds
    ends_at = None if allocation is None or margin is None else allocation.ends_at()
    return None if ends_at is None or margin is None else ends_at - min(_LEAST_SECONDS, margin / 2)


class Signals:
    """Signals that arrive while a run uploads, those that ask again for the same left out.

    Args:
        last: when the last one arrived before, in seconds of the monotonic clock.
    """

    def __init__(self, last: float | None = None) -> None:
        self.received: list[signal.Signals] = []
        self._last = -math.inf if last is None else last

    def note(self, number: signal.Signals) -> None:
        """Keep a signal; called by a handler."""
        now = time.monotonic()
        window = repeat_window_seconds() if self.received else REPEAT_WINDOW_SECONDS
        if now - self._last > window:
            self.received.append(number)
            self._last = now


@contextmanager
def signals_kept(train: TrainingConfig) -> Iterator[Signals]:
    """Keep the signals of `train.exit_signals` instead of ending the process; elsewhere than in the main thread, none.

    Args:
        train: the run's configuration.
    """
    if not train.exit_signal_handler or threading.current_thread() is not threading.main_thread():
        yield Signals()
        return
    with DistributedSignalHandler(train.exit_signals) as handler:
        active = handler.innermost
        signals = Signals(active.first_time)
        active.instead = signals.note
        try:
            yield signals
        finally:
            active.instead = None
