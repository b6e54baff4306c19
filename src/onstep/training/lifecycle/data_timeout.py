"""Waits for a training batch, with a time limit once the run has been asked to exit."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Generic, TypeVar

from onstep.errors import OnstepError, text_of
from onstep.training.runs.signals import DistributedSignalHandler

T = TypeVar("T")

_RETRY_SECONDS = 0.05
_DEATH_SECONDS = 1.0


class DataTimeout(OnstepError):  # noqa: N818 - ends a wait, and the run then saves; nothing went wrong
    """The run gave up on a training batch after a signal. The reader is where it was before the read."""


class DataWait(Generic[T]):
    """A read that is abandoned `data_timeout` seconds after a signal, received before or during the read.

    The read is interrupted in the main thread, by an exception between two of its bytecodes; SIGALRM and the real-time
    timer are borrowed for this and given back. It must be a Python function whose loader leaves no half-read stream
    behind, such as those of `onstep.data`. Stuck workers need up to five more seconds to end.

    Args:
        read: called for each read.
        handler: already entered; without one, or outside the main thread, reads have no time limit.
        data_timeout: None waits indefinitely.
    """

    def __init__(
        self, read: Callable[[], T], handler: DistributedSignalHandler | None, data_timeout: float | None
    ) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        is_watched = handler is not None and handler.is_installed and in_main_thread
        self._read = read
        self._handler = handler.innermost if handler is not None and is_watched else None
        self._seconds = data_timeout
        self._has_given_up = self._has_lost_worker = False
        self._armed_at: float | None = None
        self._previous_handler: Any = None
        self._previous_timer = (0.0, 0.0)

    def __call__(self) -> T:
        """Return the result of the read.

        Raises:
            DataTimeout: when the time is up, or when the signal has also ended the data workers. Data read so far is
                dropped.
        """
        handler = self._handler
        if handler is None:
            return self._read()
        before = handler.on_first_signal, handler.on_lost_worker
        handler.on_first_signal, handler.on_lost_worker = self._arm, self._give_up
        try:
            if handler.received:
                self._arm()
            return _run(self._read)
        except _GiveUp:
            why = f"no training batch within train.data_timeout={self._seconds} seconds after {handler.signal_name}"
            if self._has_lost_worker:
                why = f"the data workers ended with {handler.signal_name}"
            raise DataTimeout(why) from None
        except (RuntimeError, OSError, EOFError) as error:
            if handler.received and ("DataLoader worker" in text_of(error) or _are_workers_lost(handler)):
                raise DataTimeout(f"the data workers ended with {handler.signal_name}: {text_of(error)}") from error
            raise
        finally:
            handler.on_first_signal, handler.on_lost_worker = before
            if self._armed_at is not None:
                self._disarm()
            self._has_given_up = self._has_lost_worker = False

    def _arm(self) -> None:
        """Start the timer once, if there is a limit."""
        if self._seconds is None or self._armed_at is not None:
            return
        self._armed_at = time.monotonic()
        self._previous_handler = signal.signal(signal.SIGALRM, self._expire)
        self._previous_timer = signal.setitimer(signal.ITIMER_REAL, self._seconds, _RETRY_SECONDS)

    def _disarm(self) -> None:
        """Give the timer back, with the remaining time of a user's own."""
        if self._armed_at is None:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        handler = self._previous_handler
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        delay, interval = self._previous_timer
        if delay > 0:
            left = delay - (time.monotonic() - self._armed_at)
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-6), interval)
        self._armed_at = None

    def _give_up(self, frame: FrameType | None) -> None:
        """Interrupt the read because its workers are gone; only once, so that unwinding is not disturbed."""
        if not self._has_given_up and _is_reading(frame):
            self._has_given_up = self._has_lost_worker = True
            raise _GiveUp

    def _expire(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the read, unless it has already returned and advanced the position."""
        is_late = self._armed_at is not None and time.monotonic() - self._armed_at >= (self._seconds or 0)
        if not is_late or not _is_reading(frame):
            return  # the timer fires again
        signal.setitimer(signal.ITIMER_REAL, 0)
        if not self._has_given_up:
            self._has_given_up = True
            raise _GiveUp


def _run(read: Callable[[], T]) -> T:
    """Run the read; this function's frame on the stack, below another one, shows that it has not returned yet."""
    return read()


def _are_workers_lost(handler: DistributedSignalHandler) -> bool:
    """Whether the signal has ended data workers; their sockets close shortly before the system reports their exit."""
    deadline = time.monotonic() + _DEATH_SECONDS
    while not handler.lost_workers and time.monotonic() < deadline:
        time.sleep(_RETRY_SECONDS)
    return handler.lost_workers


class _GiveUp(BaseException):
    """Not an Exception: a dataset that retries on errors must not swallow it."""


def _is_reading(frame: FrameType | None) -> bool:
    above = frame
    while above is not None:
        if above.f_code is _run.__code__:
            return above is not frame
        above = above.f_back
    return False
