"""Feeds a tracker with the lines of a run, in a thread of its own: its faults can never block or end training."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from onstep.config.trackers import TRACKERS
from onstep.files.durability import try_to_sync
from onstep.record.saved_log import step_of
from onstep.trackers.breaker import CircuitBreaker
from onstep.trackers.lines import Line, Lines, MemoryLines, RecordLines, TakenBackError
from onstep.trackers.metric_names import HF
from onstep.trackers.progress import Place, Progress, read_progress, write_progress
from onstep.trackers.projection import Projection
from onstep.trackers.tracker import CannotContinueError, RunIdentity, Tracker

logger: logging.Logger = logging.getLogger(__name__)

SETTLING_SECONDS = 2.0
"""After this time, a tracker has written the points it received; W&B, Trackio and MLflow need up to a second."""
_SAVING_SECONDS = 0.2
"""The shortest time between two writes of the progress."""


class _Session:
    """The thread between an `open` and its `close`, and what it is to do."""

    def __init__(self, run: RunIdentity, lines: Lines, file: Path | None, progress: Progress) -> None:
        self.run, self.lines = run, lines
        self.file = file
        """Where the progress is kept; None where there is no record."""
        self.settled = progress
        """What the tracker has for certain, even if the process is killed now."""
        self.thread: threading.Thread | None = None
        """None if the system could not start a thread."""
        self.wake = threading.Event()
        self.calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What the thread is to do besides, in order."""
        self.closes_as: str | None = None
        """Set by `begin_close`: how the run ended."""
        self.is_abandoned = False
        """Set when `close` has timed out."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self.thread is not None and self.thread.is_alive()


class TrackerFeed:
    """Sends the lines of a run to a tracker, in order, in a daemon thread that reads them at its own pace.

    No method blocks (`finish_close` waits at most the given time), and none raises because of the tracker's faults. A
    tracker that raises, hangs or is too slow is *behind*: what it lacks stays in the record, and is sent once it works
    again, at the next start of the run, or by ``onstep logs replay``. It causes one warning between `open` and
    `close`. After five failures in a row it is tried once a minute; a line that it refuses although it accepts the next
    one is left out, with a warning. Forked children (a data loader's workers) send nothing.

    Args:
        tracker: The tracker; all its methods are called from the thread.
        name: Its name in the run, if another one has its own.
        names: Naming schemes: hf, bridge, or both.
        breaker: Decides when a failing tracker is tried again.
    """

    def __init__(
        self,
        tracker: Tracker,
        name: str | None = None,
        names: Sequence[str] = (HF,),
        *,
        breaker: CircuitBreaker | None = None,
    ) -> None:
        self.tracker = tracker
        self.name = name or tracker.name
        self._takes_back = bool(getattr(tracker, "takes_back", False))
        self._settling = 0.0 if self._takes_back else float(getattr(tracker, "settling_seconds", SETTLING_SECONDS))
        self._names = tuple(names)
        self._breaker = breaker or CircuitBreaker()
        self._process = os.getpid()
        self._session: _Session | None = None
        self._last_session: _Session | None = None
        """The one before: closed, but its thread may still be running."""
        self._warnings, self._state_warnings = itertools.count(), itertools.count()

        # In the thread only:
        self._progress = Progress()
        self._unsettled: deque[tuple[float, Progress]] = deque()
        self._saved_at = -_SAVING_SECONDS
        self._last = Line({}, 0)
        """The last line that the tracker has."""
        self._state_before: Mapping[str, Any] = {}
        """The tracker's last state."""
        self._is_tracker_open = False
        self._num_sent = 0
        """Number of lines of which the tracker was sent something."""
        self._projection = Projection(self._names, tracker)
        self._skips: Progress | None = None
        """What the tracker has of steps that were taken back, and come again; None beyond."""
        self._highest = -1
        """The highest step since the tracker was opened."""

    @property
    def is_open(self) -> bool:
        """Whether it is between `open` and `close`."""
        return self._session is not None

    @property
    def is_broken(self) -> bool:
        """Whether the tracker currently accepts nothing: it fails repeatedly, or its thread has ended."""
        return self._breaker.is_open or (self._session is not None and not self._session.is_alive)

    def open(self, run: RunIdentity, lines: Lines, file: Path | None, progress: Progress | None = None) -> None:
        """Begin to feed the tracker; an open one is closed first.

        Args:
            lines: What it is sent, from the place that its progress has.
            file: Where the progress is kept: that in it is continued if it is of this run.
            progress: The progress to continue where `file` has none; None for a new run.
        """
        if self._process != os.getpid():
            return
        if self._session is not None:
            self.begin_close("preempted")
            self.finish_close(0.0, is_final=False)
        found = None if file is None else read_progress(file)
        if found is None or found.run_id != run.run_id:
            found = progress or Progress()
        self._warnings = itertools.count()
        self._breaker.succeeded()
        self._session = session = _Session(run, lines, file, replace(found, run_id=run.run_id))
        name = f"tracker-{self.name}"
        thread = threading.Thread(target=self._work, args=(session, self._last_session), name=name, daemon=True)
        try:
            thread.start()
            session.thread = thread
        except RuntimeError as error:  # the system cannot start more threads
            self._warn(f"has no thread: {error}", session)

    @property
    def lines(self) -> Lines | None:
        """What the tracker is sent while it is open."""
        return None if self._session is None else self._session.lines

    @property
    def settled(self) -> Progress | None:
        """What the tracker has for certain, even if the process is killed now; None before the first `open`."""
        session = self._session or self._last_session
        return None if session is None else session.settled

    def wake(self) -> None:
        """Tell the thread that there are lines, or that some were taken back."""
        if self._session is not None:
            self._session.wake.set()

    def call(self, function: Callable[[], None]) -> None:
        """Let the thread call a function once the tracker is open; its faults are the tracker's."""
        session = self._session
        if session is not None and self._process == os.getpid():
            session.calls.put(function)
            session.wake.set()

    def media(self, values: Mapping[str, Any], step: int) -> None:
        """Show values that are not numbers (images, tables), if the tracker has `media`."""
        media = getattr(self.tracker, "media", None)
        if media is not None:
            self.call(lambda: media(values, step))

    def client(self, timeout: float = 30.0) -> Any:
        """The object with the service's own methods; waits until the tracker is open.

        Raises:
            AttributeError: if it is not open within `timeout` seconds, or has no methods of its own.
        """
        is_done, session = threading.Event(), self._session
        if session is not None and session.is_alive:
            self.call(is_done.set)
            is_done.wait(timeout)
        found = getattr(self.tracker, "client", None) if self._is_tracker_open else None
        if found is None:
            raise AttributeError(
                f"the tracker {self.tracker.name!r} has no client now: its run is open from the start of training to "
                f"its end; one of a TrackersCallback from that callback's on_train_start on"
            )
        return found

    def make_durable(self) -> None:
        """Fsync the tracker's local files, if it names them by `local_files()`; may be called from another thread."""
        local_files = getattr(self.tracker, "local_files", None)
        try:
            paths = list(map(Path, local_files())) if callable(local_files) else []
        except Exception as error:  # noqa: BLE001 - third-party code
            logger.warning(
                "The tracker %r cannot name its files: %s: %s", self.tracker.name, type(error).__name__, error
            )
            return
        for path in paths:
            try_to_sync(path)

    def begin_close(self, status: str) -> None:
        """Tell the thread to send what is left, close the tracker and exit; `finish_close` waits for it."""
        session = self._session
        if session is None or self._process != os.getpid():
            return
        session.closes_as = session.closes_as or status
        session.wake.set()

    def finish_close(self, timeout: float, is_final: bool = True) -> None:
        """Wait at most `timeout` seconds for the close that `begin_close` started."""
        session, self._session = self._session, None
        if session is None or self._process != os.getpid():
            return
        if session.thread is not None and is_final:
            session.thread.join(max(timeout, 0.0))
            if session.is_alive:
                session.is_abandoned = True
                self._warn(
                    f"did not finish within {timeout:g} s and is behind, after step {session.settled.step}", session
                )
        self._last_session = session

    def _warn(self, what: str, session: _Session) -> None:
        """Warn once per session: further faults have the same remedy."""
        if next(self._warnings) > 0:
            return
        if session.file is None:
            remedy = "The points in memory are lost when the process ends; give the run a directory to keep them."
        elif self.tracker.name in TRACKERS:
            remedy = (
                f"The record of the run has all points: what the tracker lacks is sent when the run continues, or by: "
                f"onstep logs replay {session.run.directory} --to {self.tracker.name}"
            )
        else:
            remedy = (
                f"The record of the run has all points: what the tracker lacks is sent when the run continues, or by: "
                f"onstep.trackers.complete({str(session.run.directory)!r}, tracker)"
            )
        logger.warning("The tracker %r %s. Training continues. %s", self.tracker.name, what, remedy)

    def send_now(self, run: RunIdentity, lines: Lines, file: Path | None, status: str) -> int:
        """Open the tracker, send what it lacks in this thread, and close it.

        Returns:
            The number of lines that it was sent something of.

        Raises:
            Exception: that of the tracker.
        """
        found = None if file is None else read_progress(file)
        known = found if found is not None and found.run_id == run.run_id else Progress()
        session, self._num_sent, ended = _Session(run, lines, file, replace(known, run_id=run.run_id)), 0, "failed"
        self._last_session = session
        self._continue(session)
        try:
            self._open_tracker(session)
            while self._send_some(session):
                self._save(session)
            ended = status
        finally:
            was_open, self._is_tracker_open = self._is_tracker_open, False
            if was_open:
                self.tracker.close(ended)
        session.settled = self._progress
        self._write(session)
        return self._num_sent

    # In the tracker's thread

    def _work(self, session: _Session, previous: _Session | None) -> None:
        """Send lines until the close; a tracker is never used by two threads at once."""
        if previous is not None and previous.thread is not None:
            previous.thread.join()
        self._continue(session)
        while not session.is_abandoned:
            closes = session.closes_as is not None
            self._catch_up(session, closes)
            if closes:
                break
            session.wake.wait(_SAVING_SECONDS if self._unsettled else 1.0)
            session.wake.clear()
        self._close_tracker(session, session.closes_as or "failed")

    def _continue(self, session: _Session) -> None:
        """Continue the run's progress."""
        progress = session.settled.in_lines(session.lines)
        was_cut, self._highest = not session.lines.has(progress.last.line), -1
        self._skips = progress if was_cut and not self._takes_back else None
        if self._takes_back:
            progress = replace(progress, step=-1, values={}, num_own=0, tags_until=-1, state={})
        self._progress = progress
        self._unsettled.clear()
        continues = not self._takes_back and not was_cut
        self._last = progress.last.line if continues else progress.place.line
        is_record = isinstance(session.lines, RecordLines)
        self._projection = Projection(self._names, self.tracker, progress.step, progress.values, is_record)

    def _catch_up(self, session: _Session, closes: bool) -> None:
        """Send all lines that there are, unless the tracker fails repeatedly."""
        may_try = self._breaker.allows() or closes
        while may_try and not session.is_abandoned:
            try:
                self._call(session)
                if not self._send_some(session):
                    break
            except BaseException as error:  # noqa: BLE001 - third-party code; its faults must not affect training
                self._breaker.failed()
                self._warn(f"failed with {type(error).__name__}: {error}", session)
                may_try = not self._breaker.is_open or self._leaves_out(session)
            else:
                self._breaker.succeeded()
        self._save(session)

    def _call(self, session: _Session) -> None:
        self._open_tracker(session)
        while True:
            try:
                function = session.calls.get_nowait()
            except Empty:
                break
            function()

    def _go_back(self, session: _Session) -> None:
        """Go back to the newest place that the lines still have."""
        session.settled = self._progress
        if self._takes_back:
            self._close_tracker(session, "preempted")
        self._continue(session)
        self._open_tracker(session)

    def _open_tracker(self, session: _Session) -> None:
        """Open the tracker, unless it is open, at the newest place that it has not lost."""
        if self._is_tracker_open:
            return
        progress = self._progress
        try:
            state = progress.place.state if self._takes_back else progress.state
            self.tracker.open(session.run, dict(state))
        except CannotContinueError:
            if not progress.places or progress.place == Place():
                raise
            session.settled = replace(progress, places=progress.places[:-1])
            self._continue(session)
            self._open_tracker(session)
            return
        self._is_tracker_open = True
        self._state_before = state
        own = self._state()
        if self._takes_back:
            progress = replace(progress, places=(*progress.places[:-1], replace(progress.place, state=own)))
        else:
            progress = replace(progress, state=own)
        self._progress = progress
        self._note()
        self._save(session, at_once=True)

    def _close_tracker(self, session: _Session, status: str) -> None:
        was_open, self._is_tracker_open = self._is_tracker_open, False
        if not was_open:
            return
        try:
            self.tracker.close(status)
        except BaseException as error:  # noqa: BLE001 - as in `_catch_up`
            self._warn(f"failed with {type(error).__name__}: {error}", session)
        else:
            self._unsettled.clear()
            session.settled = self._progress
            self._write(session)

    def _send_some(self, session: _Session) -> bool:
        """Send the next lines; whether there were any."""
        try:
            lines = session.lines.read(self._last)
        except TakenBackError:
            self._go_back(session)
            return True
        expect = getattr(self.tracker, "expect", None)
        if expect is not None and len(lines) > 1:
            expect(self._projection.names_of(line.data for line in lines))
        for line in lines:
            if session.is_abandoned:
                break
            self._send(line)
            self._took(line)
            self._breaker.succeeded()
            self._save(session)
            if not session.calls.empty():
                self._call(session)
        return bool(lines)

    def _send(self, line: Line) -> None:
        """Send the points of a line that the tracker does not have yet."""
        step = step_of(line.data)
        has = self._skips
        if has is not None and step > has.step:
            has = self._skips = None
        if has is not None and step < has.step:
            return
        is_own = self._is_own(line)
        if is_own and has is not None and has.num_own > 0:
            self._skips = replace(has, num_own=has.num_own - 1)
            return
        tags_after = -1 if has is None else has.tags_until
        calls = list(self._projection.calls(line.data, is_own, tags_after))
        for call in calls:
            call()
        self._num_sent += bool(calls)

    def _took(self, line: Line) -> None:
        """Note that the tracker has a line."""
        progress, step, projection = self._progress, step_of(line.data), self._projection
        steps = projection.steps_of(line.data)
        is_new_step = projection.is_complete and min(steps) > self._highest
        self._highest = max(self._highest, *steps)
        if self._skips is None or step >= self._skips.step:
            projection.took(line.data)
        is_checkpoint = line.data.get("kind") == "checkpoint"
        if is_new_step:
            state = self._state_before if self._takes_back else {}
            place = Place(self._last.end, self._last.size, self._last.digest, state, line.size, line.digest)
            progress = progress.at(place, is_checkpoint=False)
        if is_checkpoint:
            progress = progress.at(progress.place, is_checkpoint=True)
        if step >= progress.step:
            num_own = (progress.num_own if step == progress.step else 0) + self._is_own(line)
            progress = replace(progress, step=step, values=projection.values, num_own=num_own)
        last = Place(line.end, line.size, line.digest)
        self._progress = replace(progress, last=last, tags_until=max(progress.tags_until, projection.tags_until))
        self._last = line
        if self._takes_back:
            self._state()
        self._note()

    def _is_own(self, line: Line) -> bool:
        return line.data.get("kind") == "tracker" and line.data.get("to") == self.name

    def _state(self) -> Mapping[str, Any]:
        """The tracker's state; the one before, with a warning, if it is not plain."""
        try:
            state: dict[str, Any] = json.loads(json.dumps(dict(self.tracker.state_dict())))
        except (TypeError, ValueError, RecursionError) as error:
            if next(self._state_warnings) == 0:
                logger.warning(
                    "The state of the tracker %r cannot be kept (%s: %s); the one before stays",
                    self.tracker.name,
                    type(error).__name__,
                    error,
                )
            return self._state_before
        self._state_before = state
        return state

    def _note(self) -> None:
        self._unsettled.append((time.monotonic(), self._progress))

    def _save(self, session: _Session, at_once: bool = False) -> None:
        """Keep what has settled, at most every `_SAVING_SECONDS`."""
        now = time.monotonic()
        if not at_once and now - self._saved_at < _SAVING_SECONDS:
            return
        settled = None
        while self._unsettled and (at_once or now - self._unsettled[0][0] >= self._settling):
            settled = self._unsettled.popleft()[1]
        if settled is not None:
            self._saved_at, session.settled = now, settled
            self._write(session)

    def _write(self, session: _Session) -> None:
        if isinstance(session.lines, MemoryLines):
            session.lines.forget(session.settled.place.end)
        if session.file is not None:
            try:
                write_progress(session.file, session.settled)
            except OSError as error:
                logger.debug("%s cannot be written: %s", session.file, error)  # the tracker gets some lines again

    def _leaves_out(self, session: _Session) -> bool:
        """Leave out the next line if the tracker refuses it, but accepts the one after it; whether it does."""
        lines = session.lines.read(self._last)[:2] if self._is_tracker_open else []
        if len(lines) < 2:
            return False
        try:
            self._send(lines[1])
        except BaseException:  # noqa: BLE001 - as in `_catch_up`
            return False
        logger.warning(
            "The tracker %r refuses a line of step %d, which it will lack", self.tracker.name, step_of(lines[0].data)
        )
        self._took(lines[0])
        self._took(lines[1])
        self._breaker.succeeded()
        return True
