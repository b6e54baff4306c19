"""Runs a sink in a thread of its own, so that nothing a tracker does can hold or end the training."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from onstep.trackers.metric_names import how_to_fill
from onstep.trackers.points import SETTLING_SECONDS, read_numbers
from onstep.trackers.tracker import MetricSink, RunIdentity

logger: logging.Logger = logging.getLogger(__name__)

_MARK_SECONDS = 0.25


class Deliveries:
    """Counts what is handed over by one thread and taken by another.

    What was taken counts as unsettled for `SETTLING_SECONDS` more: trackers write what they are given a little later.

    Args:
        clock: Seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: tuple[tuple[float, int], ...] = ()
        """Moments at which everything up to a number was taken, the newest last; only the taker replaces them."""
        self._newest = (0.0, 0)
        self.num_given = 0
        """Points that were handed over so far."""

    def give(self, number: int = 1) -> int:
        """Count points that are handed over; returns the number of the last one."""
        self.num_given += number
        return self.num_given

    def take(self, number: int) -> None:
        """Everything up to `number` has been taken."""
        now = self._clock()
        self._newest = (now, number)
        if self._marks and now - self._marks[-1][0] < _MARK_SECONDS:
            return
        settled = [mark for mark in self._marks if now - mark[0] >= SETTLING_SECONDS]
        young = [mark for mark in self._marks if now - mark[0] < SETTLING_SECONDS]
        self._marks = (*settled[-1:], *young, self._newest)

    @property
    def num_unsettled(self) -> int:
        """Points, counted from the newest back to the oldest that a kill might take."""
        last_settled = self._clock() - SETTLING_SECONDS
        numbers = [number for at, number in (*self._marks, self._newest) if at <= last_settled]
        return self.num_given - max(numbers, default=0)


@dataclass(frozen=True)
class Task:
    """One call of the sink that waits for its turn."""

    call: Callable[[], None]
    is_point: bool = True
    """Whether it may be dropped, and counts as such."""
    number: int = 0
    """How many points were handed over up to here."""


class Session:
    """The thread between one `open` and its `close`, and what waits for it."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.deliveries = Deliveries()
        self.num_again = 0
        """Points of an earlier process that are given to the sink again."""
        self.thread: threading.Thread | None = None
        """None where the system gave none."""
        self.is_closing = False
        self.is_abandoned = False
        """`close` has waited long enough: points that still wait are not delivered any more."""

    @property
    def is_alive(self) -> bool:
        """Whether anybody takes what is handed over."""
        return self.thread is not None and self.thread.is_alive()


class CircuitBreaker:
    """Says whether something that keeps failing may be tried: not for a while after several failures in a row.

    Args:
        most_failures: Failures in a row after which it is left alone.
        retry_seconds: How long; then one attempt decides about the next while.
        clock: Seconds that only grow.
    """

    def __init__(
        self, most_failures: int = 5, retry_seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._most_failures = most_failures
        self._retry_seconds = retry_seconds
        self._clock = clock
        self._failures = 0
        self._failed_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last attempts failed, so that it is left alone but for single attempts."""
        return self._failures >= self._most_failures

    def allows(self) -> bool:
        """Whether it may be tried now."""
        return not self.is_open or self._clock() - self._failed_at >= self._retry_seconds

    def succeeded(self) -> None:
        """An attempt went well: all is forgotten."""
        self._failures = 0

    def failed(self) -> None:
        """An attempt failed."""
        self._failures += 1
        self._failed_at = self._clock()


class SinkQueue:
    """A sink behind a bounded queue, in a daemon thread.

    No method blocks (`close` waits, at most `close_timeout`) and none raises for the sink's faults. A sink that raises,
    is too slow, hangs or ends its thread costs one warning between `open` and `close`; what it did not take is counted
    in `dropped`. One that fails five times in a row is left alone for a minute, then tried again. In a forked child (a
    data loader's worker) nothing is delivered.

    Args:
        sink: The tracker; all its methods are called from the thread.
        capacity: Points and texts that wait at the most; of more, the newest are dropped.
        close_timeout: Seconds that `close` waits for what is still to be delivered.
        breaker: When a failing sink is tried again.
        remedy: What the warning says of points that the sink misses; None is how the journal fills the sink.
    """

    def __init__(
        self,
        sink: MetricSink,
        capacity: int = 1000,
        close_timeout: float = 30.0,
        *,
        breaker: CircuitBreaker | None = None,
        remedy: str | None = None,
    ) -> None:
        self.sink = sink
        self._takes_back = bool(getattr(sink, "takes_back", False))
        self._remedy = remedy
        self._capacity = capacity
        self._close_timeout = close_timeout
        self._breaker = breaker or CircuitBreaker()
        self._process = os.getpid()
        self._session: Session | None = None
        self._last_session: Session | None = None
        """Closed, but perhaps not ended yet."""
        self._folder = Path()
        self._is_sink_open = False
        self._to_open: Callable[[], None] | None = None
        """What opens the sink, until it has succeeded; like the flag before, only the thread looks at it."""
        self._refused = 0
        """Points dropped by the caller's thread."""
        self._lost = 0
        """Points dropped by the sink's thread."""
        self._state: dict[str, Any] = {}
        self._warnings = itertools.count()
        self._state_warnings = itertools.count()

    @property
    def dropped(self) -> int:
        """Points and texts that the sink did not take since it was opened."""
        return self._refused + self._lost

    @property
    def is_broken(self) -> bool:
        """Whether the sink takes nothing at the moment: it fails again and again, or its thread is gone."""
        return self._breaker.is_open or (self._session is not None and not self._session.is_alive)

    @property
    def num_waiting(self) -> int:
        """The newest points that a kill might take: what the sink has yet to take, and took in the last seconds.

        A sink that has not been opened yet has still to take its run's `last_points` too. Of a sink that takes nothing
        for long, no more than it would be given again at the next start.
        """
        session = self._session
        if session is None:
            return 0
        most = min(2 * self._capacity + session.num_again, 20 * self._capacity)
        return min(session.deliveries.num_unsettled, most)

    @property
    def is_open(self) -> bool:
        """Between `open` and `close`."""
        return self._session is not None

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Open the sink, in its thread; one that is open is closed first, as for a run that goes on.

        A sink that cannot take points back is given the run's `last_points` again.
        """
        if self._process != os.getpid():
            return
        self._folder, self._state = run.folder, dict(state)
        if self._session is None:
            self._session = self._start()
        else:
            self._put_close(self._session, "preempted")
        self._put_open(self._session, run, dict(state))

    def log(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> None:
        """Hand over the numbers of a step; 0-d tensors are read by the thread. Without metrics, nothing is told."""
        metrics = dict(metrics)
        self._offer(lambda: self._log(metrics, step, timestamp))

    def text(self, tag: str, text: str, step: int) -> None:
        """Hand over a text."""
        self._offer(lambda: self.sink.text(tag, text, step))

    def state_dict(self) -> dict[str, Any]:
        """The sink's state after the last call that it finished; until then, what it was opened with."""
        return dict(self._state)

    def close(self, status: str) -> None:
        """Close the sink after what waits, and wait for that at most `close_timeout`; closing twice is harmless."""
        self.begin_close(status)
        self.finish_close(self._close_timeout)

    def begin_close(self, status: str) -> None:
        """Ask the thread to close the sink and to end; `finish_close` waits for it."""
        session = self._session
        if session is None or session.is_closing or self._process != os.getpid():
            return
        session.is_closing = True
        self._put_close(session, status)
        session.tasks.put(None)

    def finish_close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the end of what `begin_close` began."""
        session, self._session = self._session, None
        if session is None or self._process != os.getpid():
            return
        if session.thread is not None:
            session.thread.join(max(timeout, 0.0))
        is_late = session.is_alive
        if is_late or not session.tasks.empty():
            session.is_abandoned = True
            self._refused += max(session.tasks.qsize() - 2, 0)  # without the two last ones of `begin_close`
            self._warn(f"did not finish within {timeout:g} s and was left behind" if is_late else "lost its thread")
        self._last_session = session
        if self.dropped:
            logger.info("the tracker %r missed %d points", self.sink.name, self.dropped)

    def _start(self) -> Session:
        """A session with a thread of its own, which begins when the one before it has ended."""
        self._refused = self._lost = 0
        self._warnings, self._state_warnings = itertools.count(), itertools.count()
        self._breaker.succeeded()
        session, name = Session(), f"sink-{self.sink.name}"
        thread = threading.Thread(target=self._work, args=(session, self._last_session), name=name, daemon=True)
        try:
            thread.start()
            session.thread = thread
        except RuntimeError as error:  # the system gives no more threads
            self._warn(f"has no thread: {error}")
        return session

    def _put_open(self, session: Session, run: RunIdentity, state: dict[str, Any]) -> None:
        """Let the sink be opened, and given again what an earlier process may have lost: beyond the capacity."""
        points = () if run.adds_only else run.last_points
        session.num_again = len(points)
        number = session.deliveries.give(len(points) if self._takes_back else 0)
        session.tasks.put(Task(lambda: self._open_sink(run, state), is_point=False, number=number))
        for point in () if self._takes_back else points:
            call = partial(self._log, dict(point.metrics), point.step, point.timestamp)
            session.tasks.put(Task(call, number=session.deliveries.give()))

    def _put_close(self, session: Session, status: str) -> None:
        number = session.deliveries.num_given
        session.tasks.put(Task(lambda: self._close_sink(status), is_point=False, number=number))

    def _offer(self, call: Callable[[], None]) -> None:
        if self._process != os.getpid():
            return
        session = self._session
        number = 0 if session is None else session.deliveries.give()
        if session is None or session.is_closing:
            self._refused += 1
        elif not session.is_alive:
            self._refused += 1
            self._warn("lost its thread")
        elif session.tasks.qsize() >= self._capacity + session.num_again:
            self._refused += 1
            self._warn(f"is slower than the run ({self._capacity} points wait for it)")
        else:
            session.tasks.put(Task(call, number=number))

    def _warn(self, what: str) -> None:
        """Say it once a session: what else goes wrong has the same remedy."""
        if next(self._warnings) > 0:
            return
        logger.warning(
            "The tracker %r %s. What it misses is counted in `sink/dropped`; training goes on. %s",
            self.sink.name,
            what,
            self._remedy or how_to_fill(self.sink.name, self._folder),
        )

    # In the sink's thread

    def _work(self, session: Session, previous: Session | None) -> None:
        """Deliver task after task; a sink is never in two threads at once."""
        if previous is not None and previous.thread is not None:
            previous.thread.join()
        while (task := session.tasks.get()) is not None:
            if not (session.is_abandoned and task.is_point):
                self._deliver(task)
                if self._to_open is None or not self._takes_back:
                    session.deliveries.take(task.number)

    def _deliver(self, task: Task) -> None:
        if task.is_point and not self._breaker.allows():
            self._lost += 1
            return
        try:
            if task.is_point and self._to_open is not None:
                self._to_open()
            task.call()
        except BaseException as error:  # noqa: BLE001 - foreign code; whatever it does must not reach the training
            self._breaker.failed()
            self._lost += task.is_point
            self._warn(f"failed with {type(error).__name__}: {error}")
        else:
            self._breaker.succeeded()
            self._keep_state()

    def _keep_state(self) -> None:
        try:
            # a copy of plain values only, so that no sink can make a checkpoint fail
            self._state = json.loads(json.dumps(self.sink.state_dict()))
        except BaseException as error:  # noqa: BLE001 - foreign code, as in `_deliver`
            if next(self._state_warnings) > 0:  # it is said once a session: points are not touched by it
                return
            logger.warning(
                "The tracker %r has a state that no checkpoint can hold (%s: %s); a run that continues hands it the "
                "state before. Its state_dict() must give plain JSON values.",
                self.sink.name,
                type(error).__name__,
                error,
            )

    def _log(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> None:
        if numbers := read_numbers(metrics):
            self.sink.log(numbers, step, timestamp)

    def _open_sink(self, run: RunIdentity, state: dict[str, Any]) -> None:
        """Open the sink; where that fails, the next point tries again."""
        self._to_open = lambda: self._open_sink(run, state)
        self.sink.open(run, state)
        self._to_open = None
        self._is_sink_open = True

    def _close_sink(self, status: str) -> None:
        was_open, self._is_sink_open, self._to_open = self._is_sink_open, False, None
        if was_open:
            self.sink.close(status)
