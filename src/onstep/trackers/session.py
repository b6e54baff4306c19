"""Defines a session of a tracker: the thread between an `open` and its `close`, and what it is to do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue

from onstep.trackers.lines import Lines
from onstep.trackers.progress import Progress
from onstep.trackers.tracker import RunIdentity


class Session:
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
        self.has_ended = False
        """Set by the thread at its end; a thread that was killed has not set it."""

    @property
    def is_alive(self) -> bool:
        """Whether the thread is running."""
        return self.thread is not None and self.thread.is_alive()
