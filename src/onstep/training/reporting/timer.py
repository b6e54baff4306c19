"""A stopwatch that accumulates seconds, on a device and over ranks too."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from onstep.errors import OnstepError

_NOTHING: AbstractContextManager[None] = nullcontext()


class TimerError(OnstepError):
    """A timer is started twice, stopped without a start, or read while it is off."""


class Timer:
    """A stopwatch that accumulates; `log` and `write` of `Timers` each read the time since they last did so.

    On CUDA, each start and stop waits for the device, so that the time covers the work queued in between.

    Args:
        name: its name in lines, tags and errors.
        clock: seconds on a monotonic clock.
        synchronize: waits for the device.
        wait_for_ranks: a barrier of all ranks.
    """

    is_on = True

    def __init__(
        self,
        name: str,
        clock: Callable[[], float] = time.perf_counter,
        synchronize: Callable[[], None] | None = None,
        wait_for_ranks: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._clock, self._synchronize, self._wait_for_ranks = clock, synchronize, wait_for_ranks
        self._started: float | None = None
        self._seconds = 0.0
        self._written = 0.0

    @property
    def is_running(self) -> bool:
        """Whether it was started and not yet stopped."""
        return self._started is not None

    def start(self, barrier: bool = False) -> None:
        """Start the timer, after a barrier of all ranks if requested, which is collective.

        Raises:
            TimerError: if it is already running.
        """
        if self._started is not None:
            raise TimerError(f"timer {self.name!r} is already running; stop it before starting it again.")
        self._started = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Stop the timer, and add the seconds since its start. Collective with `barrier`.

        Raises:
            TimerError: if it is not running.
        """
        if self._started is None:
            raise TimerError(f"timer {self.name!r} is not running; start it before stopping it.")
        self._bring_up_to_date(barrier)
        self._started = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset, including a running interval; it keeps running. Collective with `barrier`."""
        self._bring_up_to_date(barrier)
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds

    def since_written(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last write to the trackers; independent of `elapsed`. Collective with `barrier`."""
        self._bring_up_to_date(barrier)
        seconds = self._written
        if reset:
            self._written = 0.0
        return seconds

    def measure(self, barrier: bool = False) -> AbstractContextManager[None]:
        """Time a block, with a barrier before and after it; a block that fails is not counted.

        When nested, as in an evaluation that a callback runs within another, only the outer block counts. Collective
        with `barrier`.
        """
        return _NOTHING if self._started is not None else self._measured(barrier)

    @contextmanager
    def _measured(self, barrier: bool) -> Iterator[None]:
        self.start(barrier)
        try:
            yield
        except BaseException:  # other ranks might no longer reach a barrier
            self._started = None
            raise
        self.stop(barrier)

    def restart(self) -> None:
        """Discard all seconds; a running timer keeps running."""
        self._bring_up_to_date(barrier=False)
        self._seconds = self._written = 0.0

    def reset(self) -> None:
        """Discard all seconds and stop."""
        self._seconds = self._written = 0.0
        self._started = None

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._started is not None:
            self.stop()

    def _now(self, barrier: bool) -> float:
        if barrier and self._wait_for_ranks is not None:
            self._wait_for_ranks()
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def _bring_up_to_date(self, barrier: bool) -> None:
        if self._started is not None:
            now = self._now(barrier)
            self._seconds += now - self._started
            self._written += now - self._started
            self._started = now
        elif barrier and self._wait_for_ranks is not None:
            self._wait_for_ranks()


class OffTimer(Timer):
    """Replaces every timer above the level: starting and stopping it does nothing."""

    is_on = False

    def __init__(self) -> None:
        super().__init__("off")

    def start(self, barrier: bool = False) -> None:
        """Nothing."""

    def stop(self, barrier: bool = False) -> None:
        """Nothing."""

    def measure(self, barrier: bool = False) -> AbstractContextManager[None]:
        return _NOTHING

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        raise TimerError("this timer is off and has measured nothing; raise logger.timing_log_level to its level.")

    def since_written(self, reset: bool = True, barrier: bool = False) -> float:
        return self.elapsed(reset, barrier)


OFF = OffTimer()
