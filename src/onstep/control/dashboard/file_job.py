"""A run that is shown from its files: it has ended, or was started without control."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from onstep.analysis.logs.run_status import ending_of, run_record, status_of
from onstep.control.commands import CommandRefusedError
from onstep.control.dashboard.run_files import RunFiles
from onstep.control.feed import Feed
from onstep.control.inbox import Ticket


class FileJob:
    """A `ServedJob` that can only be watched. Its files are first read when somebody looks at it.

    Args:
        job_id: its id in the dashboard.
        log: the run's metrics log.
        wake: is called when somebody looks at it for the first time, so that `refresh` is called soon.
    """

    def __init__(self, job_id: str, log: Path, wake: threading.Event) -> None:
        self.job_id = job_id
        self.log = log
        self._wake = wake
        self._is_wanted = False
        self._feed, self._files = self._fresh()
        self._is_loaded = False

    def _fresh(self) -> tuple[Feed, RunFiles]:
        feed = Feed()
        name = run_record(self.log.parent).get("name") or self.log.parent.name
        feed.update(status="loading", run=name, commands=[], settable={}, read_only=self._why_read_only())
        return feed, RunFiles(self.log, feed)

    @property
    def feed(self) -> Feed:
        """What it shows; its status is ``loading`` until its files have been read."""
        if not self._is_wanted:
            self._is_wanted = True
            self._wake.set()
        return self._feed

    def describe(self) -> dict[str, Any]:
        """Its place and status, as JSON."""
        record = run_record(self.log.parent)
        word = status_of(self.log)
        return {
            "job_id": self.job_id,
            "run": record.get("name") or self.log.parent.name,
            "output_dir": str(self.log.parent),
            "started_at": record.get("started_at"),
            "status": word or "ended",
            "alive": word is not None and word.startswith("running"),
            "is_here": True,
        }

    def refresh(self) -> None:
        """Read what is new, if somebody has looked at the run; called by one thread."""
        if not self._is_wanted:
            return
        if not self._is_loaded:
            self._is_loaded = True
            self._files.load()
        elif not self._feed.is_ended:
            self._files.follow()
        elif ending_of(self.log) is None and status_of(self.log) is not None:  # it was resumed
            self._feed, self._files = self._fresh()
            self._files.load()
        if self._feed.status["status"] == "ended" and not self._feed.is_ended:
            self._feed.add_event("end", {"reason": self._feed.status.get("reason")})

    async def submit(self, command: str, data: dict[str, Any], author: str) -> Ticket:
        """Refuse the command.

        Raises:
            CommandRefusedError: always, saying why.
        """
        raise CommandRefusedError(f"{command}: {self._why_read_only()}")

    async def ticket(self, ticket_id: str) -> Ticket | None:
        """None: it accepts no commands."""
        return None

    def _why_read_only(self) -> str:
        ending = ending_of(self.log)
        if ending is not None:
            return f"{ending}."
        return "this run was started without control; it can only be watched. Start it with --control to steer it."
