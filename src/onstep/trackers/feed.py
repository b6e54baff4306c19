"""Feeds a tracker with the lines of a run, in a thread of its own: its faults can never block or end training."""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onstep.config.trackers import TRACKERS
from onstep.files.durability import try_to_sync
from onstep.trackers.breaker import CircuitBreaker
from onstep.trackers.lines import Lines
from onstep.trackers.metric_names import HF
from onstep.trackers.progress import Progress, progress_of
from onstep.trackers.sender import Sender
from onstep.trackers.session import Session
from onstep.trackers.tracker import RunIdentity, Tracker

logger: logging.Logger = logging.getLogger(__name__)


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
        self._breaker = breaker or CircuitBreaker()
        self._sender = Sender(tracker, self.name, names, self._breaker, self._warn)
        """Used in the thread only."""
        self._process = os.getpid()
        self._session: Session | None = None
        self._last_session: Session | None = None
        """The one before: closed, but its thread may still be running."""
        self._warnings = itertools.count()

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
            file: Where the progress is kept; None where there is no record.
            progress: The progress to continue; None is that in `file`, if it is of this run.
            run: what the run is: its id, name, directory and configuration.
        """
        if self._process != os.getpid():
            return
        if self._session is not None:
            self.begin_close("preempted")
            self.finish_close(0.0, is_final=False)
        self._warnings = itertools.count()
        self._breaker.succeeded()
        self._session = session = Session(run, lines, file, progress or progress_of(run.run_id, file))
        name = f"tracker-{self.name}"
        thread = threading.Thread(target=self._sender.work, args=(session, self._last_session), name=name, daemon=True)
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
        """Let the thread call a function once the tracker is open; its faults are the tracker's.

        Args:
            function: what the thread calls, without arguments.
        """
        session = self._session
        if session is not None and self._process == os.getpid():
            session.calls.put(function)
            session.wake.set()

    def media(self, values: Mapping[str, Any], step: int) -> None:
        """Show values that are not numbers (images, tables), if the tracker has `media`.

        Args:
            values: images, tables and the like, by name.
            step: the step of the values.
        """
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
        found = getattr(self.tracker, "client", None) if self._sender.is_tracker_open else None
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
        """Tell the thread to send what is left, close the tracker and exit; `finish_close` waits for it.

        Args:
            status: how the run ended, such as `finished` or `failed`.
        """
        session = self._session
        if session is None or self._process != os.getpid():
            return
        session.closes_as = session.closes_as or status
        session.wake.set()

    def finish_close(self, timeout: float, is_final: bool = True) -> None:
        """Wait at most `timeout` seconds for the close that `begin_close` started.

        Args:
            is_final: whether the feed is not used again.
        """
        session, self._session = self._session, None
        if session is None or self._process != os.getpid():
            return
        if session.thread is not None and is_final:
            session.thread.join(max(timeout, 0.0))
            session.is_abandoned = session.is_alive
            if not session.has_ended:
                what = f"did not finish within {timeout:g} s" if session.is_alive else "lost its thread"
                self._warn(f"{what} and is behind, after step {session.settled.step}", session)
        self._last_session = session

    def _warn(self, what: str, session: Session) -> None:
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

        Args:
            run: what the run is: its id, name, directory and configuration.
            lines: the lines of the record that the tracker lacks.
            file: the metrics log; None for none.
            status: how the run ended, such as `finished` or `failed`.

        Returns:
            The number of lines that it was sent something of.

        Raises:
            Exception: that of the tracker.
        """
        self._last_session = session = Session(run, lines, file, progress_of(run.run_id, file))
        return self._sender.send_now(session, status)
