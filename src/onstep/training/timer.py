"""One timer of a run: a stopwatch that adds up, and what stands in for one that is off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

from onstep.errors import OnstepError

_NOTHING: AbstractContextManager[None] = nullcontext()


class TimerError(OnstepError):
    """A timer is started twice, stopped unstarted, or read although it is not on."""


class Timer:
    """A stopwatch that adds up; `log` and `write` of `Timers` each read what came since they last read.

    On CUDA the device is waited for at each start and stop, so that the time is that of the work which was queued in
    between.

    Args:
        name: what it is called in lines, tags and errors.
        clock: seconds on a clock that never goes back.
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
        """Whether it was started and not stopped."""
        return self._started is not None

    def start(self, barrier: bool = False) -> None:
        """Start it, after a barrier of all ranks where that is asked for; then collective.

        Raises:
            TimerError: where it runs already.
        """
        if self._started is not None:
            raise TimerError(f"timer {self.name!r} runs already; stop it before it is started again.")
        self._started = self._now(barrier)

    def stop(self, barrier: bool = False) -> None:
        """Stop it, and add the seconds since its start. Collective with `barrier`.

        Raises:
            TimerError: where it does not run.
        """
        if self._started is None:
            raise TimerError(f"timer {self.name!r} does not run; start it before it is stopped.")
        self._take_up(self._now(barrier))
        self._started = None

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since it was last reset, also while it runs; it goes on running. Collective with `barrier`."""
        self._bring_up_to_date(barrier)
        seconds = self._seconds
        if reset:
            self._seconds = 0.0
        return seconds

    def since_written(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the trackers got it last; independent of `elapsed`. Collective with `barrier`."""
        self._bring_up_to_date(barrier)
        seconds = self._written
        if reset:
            self._written = 0.0
        return seconds

    def measure(self, barrier: bool = False) -> AbstractContextManager[None]:
        """Time a block, with a barrier before and after it; a block that fails is not counted.

        Inside itself, as in an evaluation that a callback makes within another, only the outer block counts. Collective
        with `barrier`.
        """
        return _NOTHING if self._started is not None else self._measured(barrier)

    @contextmanager
    def _measured(self, barrier: bool) -> Iterator[None]:
        self.start(barrier)
        try:
            yield
        except BaseException:  # other ranks may not come to a barrier any more
            self._started = None
            raise
        self.stop(barrier)

    def restart(self) -> None:
        """Forget all seconds; one that runs goes on running."""
        self._bring_up_to_date(barrier=False)
        self._seconds = self._written = 0.0

    def reset(self) -> None:
        """Forget all seconds and stop."""
        self._seconds = self._written = 0.0
        self._started = None

    def __enter__(self) -> Timer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._started is not None:
            self.stop()

    def _now(self, barrier: bool) -> float:
        if barrier and self._wait_for_ranks is not None:
            self._wait_for_ranks()
        if self._synchronize is not None:
            self._synchronize()
        return self._clock()

    def _take_up(self, now: float) -> None:
        assert self._started is not None  # both callers have asked
        self._seconds += now - self._started
        self._written += now - self._started

    def _bring_up_to_date(self, barrier: bool) -> None:
        if self._started is not None:
            now = self._now(barrier)
            self._take_up(now)
            self._started = now
        elif barrier and self._wait_for_ranks is not None:
            self._wait_for_ranks()


class OffTimer(Timer):
    """What stands in for every timer above the level: starting and stopping it does nothing."""

    is_on = False

    def __init__(self) -> None:
        super().__init__("off")

    def __enter__(self) -> Timer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Nothing."""

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
