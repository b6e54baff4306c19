"""Runs a tracker in its own thread behind a bounded queue, so that its faults can never block or end training."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from onstep.files.durability import try_to_sync
from onstep.trackers.delivery import CircuitBreaker, Deliveries
from onstep.trackers.metric_names import how_to_fill
from onstep.trackers.points import read_numbers
from onstep.trackers.tracker import RunIdentity, Tracker

logger: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A queued call of the tracker."""

    call: Callable[[], None]
    is_point: bool = True
    """Whether the call may be dropped, and is then counted as dropped."""
    number: int = 0
    """Number of points enqueued up to and including this call."""


class Session:
    """The thread between an `open` and its `close`, and its queue."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.deliveries = Deliveries()
        self.num_again = 0
        """Points of an earlier process that are sent to the tracker again."""
        self.thread: threading.Thread | None = None
        """None if the system could not start a thread."""
        self.is_closing = False
        self.is_abandoned = False
        """Set when `close` has timed out: points still queued are no longer delivered."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self.thread is not None and self.thread.is_alive()


class TrackerQueue:
    """A tracker behind a bounded queue, in a daemon thread.

    No method blocks (`close` waits at most `close_timeout`), and none raises because of the tracker's faults. A tracker
    that raises, is too slow, hangs or ends its thread causes one warning between `open` and `close`; undelivered points
    are counted in `dropped`. After five failures in a row, it is retried once a minute. Forked children (a data
    loader's workers) deliver nothing.

    Args:
        tracker: The tracker; all its methods are called from the thread.
        capacity: Maximum number of queued points and texts; when full, new ones are dropped.
        close_timeout: Seconds that `close` waits for outstanding deliveries.
        breaker: Decides when a failing tracker is retried.
        remedy: How to recover missed points, for the warning; None explains how to fill the tracker from the metrics
            log.
    """

    def __init__(
        self,
        tracker: Tracker,
        capacity: int = 1000,
        close_timeout: float = 30.0,
        *,
        breaker: CircuitBreaker | None = None,
        remedy: str | None = None,
    ) -> None:
        self.tracker = tracker
        self._takes_back = bool(getattr(tracker, "takes_back", False))
        self._remedy = remedy
        self._capacity = capacity
        self._close_timeout = close_timeout
        self._breaker = breaker or CircuitBreaker()
        self._process = os.getpid()
        self._session: Session | None = None
        self._last_session: Session | None = None
        """The previous session: closed, but its thread may still be running."""
        self._directory = Path()
        self._is_tracker_open = False
        self._to_open: Callable[[], None] | None = None
        """Opens the tracker; None once it has succeeded. Like `_is_tracker_open`, used by the thread only."""
        self._refused = 0
        """Points dropped by the caller's thread."""
        self._lost = 0
        """Points dropped by the tracker's thread."""
        self._state: dict[str, Any] = {}
        self._warnings = itertools.count()
        self._state_warnings = itertools.count()

    @property
    def dropped(self) -> int:
        """Number of points and texts not delivered since the tracker was opened."""
        return self._refused + self._lost

    @property
    def is_broken(self) -> bool:
        """Whether the tracker currently accepts nothing: it fails repeatedly, or its thread has ended."""
        return self._breaker.is_open or (self._session is not None and not self._session.is_alive)

    @property
    def num_waiting(self) -> int:
        """Number of newest points that might be lost in a kill: those not delivered, or delivered in the last seconds.

        Until the tracker is opened, this includes the run's `last_points`. It is limited to the number of points that
        would be sent again at the next start.
        """
        session = self._session
        if session is None:
            return 0
        most = min(2 * self._capacity + session.num_again, 20 * self._capacity)
        return min(session.deliveries.num_unsettled, most)

    @property
    def is_open(self) -> bool:
        """Whether it is between `open` and `close`."""
        return self._session is not None

    def open(self, run: RunIdentity, state: Mapping[str, Any]) -> None:
        """Open the tracker in its thread; an open one is closed first, as for a run that continues.

        A tracker that cannot replace points receives the run's `last_points` again.
        """
        if self._process != os.getpid():
            return
        self._directory, self._state = run.directory, dict(state)
        if self._session is None:
            self._session = self._start()
        else:
            self._put_close(self._session, "preempted")
        self._put_open(self._session, run, dict(state))

    def log(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> None:
        """Enqueue the metrics of a step; 0-d tensors are read by the thread. Empty metrics are not sent."""
        metrics = dict(metrics)
        self._offer(lambda: self._log(metrics, step, timestamp))

    def text(self, tag: str, text: str, step: int) -> None:
        """Enqueue a text."""
        self._offer(lambda: self.tracker.text(tag, text, step))

    def media(self, values: Mapping[str, Any], step: int) -> None:
        """Enqueue values that are not numbers (images, tables), if the tracker has `media`."""
        media = getattr(self.tracker, "media", None)
        if media is not None:
            self._offer(lambda: media(values, step))

    def state_dict(self) -> dict[str, Any]:
        """The tracker's state after its last completed call; before that, the state it was opened with."""
        return dict(self._state)

    def make_durable(self) -> None:
        """Fsync the tracker's local files, if it names them by `local_files()`; may be called from another thread.

        What has not been in them for `SETTLING_SECONDS` is part of the run's state, which counts it as unsettled.
        """
        local_files = getattr(self.tracker, "local_files", None)
        try:
            paths = list(map(Path, local_files())) if callable(local_files) else []
        except Exception as error:  # noqa: BLE001 - third-party code, as in `_deliver`
            logger.warning(
                "The tracker %r cannot name its files: %s: %s", self.tracker.name, type(error).__name__, error
            )
            return
        for path in paths:
            try_to_sync(path)

    def close(self, status: str) -> None:
        """Close the tracker after outstanding deliveries, waiting at most `close_timeout`; idempotent."""
        self.begin_close(status)
        self.finish_close(self._close_timeout)

    def begin_close(self, status: str) -> None:
        """Tell the thread to close the tracker and exit; `finish_close` waits for it."""
        session = self._session
        if session is None or session.is_closing or self._process != os.getpid():
            return
        session.is_closing = True
        self._put_close(session, status)
        session.tasks.put(None)

    def finish_close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the close that `begin_close` started."""
        session, self._session = self._session, None
        if session is None or self._process != os.getpid():
            return
        if session.thread is not None:
            session.thread.join(max(timeout, 0.0))
        is_late = session.is_alive
        if is_late or not session.tasks.empty():
            session.is_abandoned = True
            self._refused += max(session.tasks.qsize() - 2, 0)  # not counting the two tasks of `begin_close`
            self._warn(f"did not finish within {timeout:g} s and was abandoned" if is_late else "lost its thread")
        self._last_session = session
        if self.dropped:
            logger.info("the tracker %r missed %d points", self.tracker.name, self.dropped)

    def _start(self) -> Session:
        """Create a session whose thread starts working when the previous one has ended."""
        self._refused = self._lost = 0
        self._warnings, self._state_warnings = itertools.count(), itertools.count()
        self._breaker.succeeded()
        session, name = Session(), f"tracker-{self.tracker.name}"
        thread = threading.Thread(target=self._work, args=(session, self._last_session), name=name, daemon=True)
        try:
            thread.start()
            session.thread = thread
        except RuntimeError as error:  # the system cannot start more threads
            self._warn(f"could not start its thread: {error}")
        return session

    def _put_open(self, session: Session, run: RunIdentity, state: dict[str, Any]) -> None:
        """Enqueue the opening, and the points that an earlier process may have lost, regardless of the capacity."""
        points = () if run.adds_only else run.last_points
        session.num_again = len(points)
        number = session.deliveries.give(len(points) if self._takes_back else 0)
        session.tasks.put(Task(lambda: self._open_tracker(run, state), is_point=False, number=number))
        for point in () if self._takes_back else points:
            call = partial(self._log, dict(point.metrics), point.step, point.timestamp)
            session.tasks.put(Task(call, number=session.deliveries.give()))

    def _put_close(self, session: Session, status: str) -> None:
        number = session.deliveries.num_given
        session.tasks.put(Task(lambda: self._close_tracker(status), is_point=False, number=number))

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
            self._warn(f"is slower than the run ({self._capacity} points are queued)")
        else:
            session.tasks.put(Task(call, number=number))

    def client(self, timeout: float = 30.0) -> Any:
        """The object with the service's own methods; waits until the tracker is open.

        Raises:
            AttributeError: if it is not open within `timeout` seconds, or has no methods of its own.
        """
        session, is_done = self._session, threading.Event()
        if session is not None and session.is_alive:
            session.tasks.put(Task(is_done.set, is_point=False, number=session.deliveries.num_given))
            is_done.wait(timeout)
        found = getattr(self.tracker, "client", None) if self._is_tracker_open else None
        if found is None:
            raise AttributeError(
                f"the tracker {self.tracker.name!r} has no client now: its run is open from the start of training to "
                f"its end; one of a TrackersCallback from that callback's on_train_start on"
            )
        return found

    def _warn(self, what: str) -> None:
        """Warn once per session: further faults have the same remedy."""
        if next(self._warnings) > 0:
            return
        logger.warning(
            "The tracker %r %s. Missed points are counted in `sink/dropped`; training continues. %s",
            self.tracker.name,
            what,
            self._remedy or how_to_fill(self.tracker.name, self._directory),
        )

    # In the tracker's thread

    def _work(self, session: Session, previous: Session | None) -> None:
        """Deliver the tasks; a tracker is never used by two threads at once."""
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
        except BaseException as error:  # noqa: BLE001 - third-party code; its faults must not affect training
            self._breaker.failed()
            self._lost += task.is_point
            self._warn(f"failed with {type(error).__name__}: {error}")
        else:
            self._breaker.succeeded()
            self._keep_state()

    def _keep_state(self) -> None:
        try:
            # copies plain values only, so that no tracker can make a checkpoint fail
            self._state = json.loads(json.dumps(self.tracker.state_dict()))
        except BaseException as error:  # noqa: BLE001 - third-party code, as in `_deliver`
            if next(self._state_warnings) > 0:  # warn once per session: points are not affected
                return
            logger.warning(
                "The state of the tracker %r cannot be saved in a checkpoint (%s: %s); a resumed run restores its "
                "previous state. Its state_dict() must return plain JSON values.",
                self.tracker.name,
                type(error).__name__,
                error,
            )

    def _log(self, metrics: Mapping[str, Any], step: int, timestamp: float) -> None:
        if numbers := read_numbers(metrics):
            self.tracker.log(numbers, step, timestamp)

    def _open_tracker(self, run: RunIdentity, state: dict[str, Any]) -> None:
        """Open the tracker; if that fails, the next point retries it."""
        self._to_open = lambda: self._open_tracker(run, state)
        self.tracker.open(run, state)
        self._to_open = None
        self._is_tracker_open = True

    def _close_tracker(self, status: str) -> None:
        was_open, self._is_tracker_open, self._to_open = self._is_tracker_open, False, None
        if was_open:
            self.tracker.close(status)
