"""A job of this process as clients meet it: registered, served over a socket, with a thread that applies commands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from onstep.commands import COMMANDS
from onstep.control.feed import Feed
from onstep.control.inbox import Check, Inbox, Ticket
from onstep.control.registry import JobInfo, Registration, describe_jobs
from onstep.control.serving.app import build_app
from onstep.control.serving.served_job import LiveJob
from onstep.control.serving.server import ControlServer
from onstep.http.access import Access, names_of

SETTABLE = {
    "lr_factor": {"kind": "float", "minimum": 0.0, "value": 1.0, "configured": 1.0, "help": "Multiplies the rate"},
    "log_interval": {"kind": "int", "minimum": 1, "value": 10, "configured": 10, "help": "Steps between logs"},
}
RESULTS = {
    "generate": [{"prompt": "def ", "text": "f():\n    return 1"}],
    "stacks": {"rank 0": 'Thread "MainThread"\n  File "train.py", line 3'},
    "profile": "runs/a/profile",
}


class SteeredJob:
    """A job whose training thread does nothing but apply commands, unless it `is_busy`."""

    def __init__(
        self,
        job_id: str = "job_a",
        *,
        token: str | None = "t" * 64,
        uds: bool = False,
        port: int | None = None,
        check: Check | None = None,
        output_dir: str | None = "/somewhere/runs/tiny",
        feed: Feed | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.job_id, self.token = job_id, token
        self.is_busy = False
        self.applied: list[Ticket] = []
        self.feed, self.inbox = feed or Feed(), Inbox(check)
        self.step = 7
        self._stopping = threading.Event()
        self._registration = Registration(job_id).open()
        path = self._registration.socket_path if uds else None
        access = Access(None if uds else token, None if uds else names_of(host))
        app = build_app(self._jobs, access=access, listed=describe_jobs, title="onstep")
        self.server = ControlServer(app, host=None if uds else host, port=port, uds=path)
        self.info = JobInfo.of_this_process(
            job_id, host=host, port=self.server.port or 0, output_dir=output_dir, uds=str(path) if path else None
        )
        self._job = LiveJob(self.info, self.feed, self.inbox, {"celebrate": "A command of a callback"})
        self.feed.update(status="running", output_dir=output_dir, global_step=self.step, max_steps=100, progress=0.07)
        self.feed.update(settable=SETTABLE, overrides={}, eta_seconds=93.0, steps_per_second=2.5)
        self.server.start()
        self._registration.publish(self.info, self.token)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        assert self.server.port is not None
        return self.server.port

    def log(self, **metrics: float) -> None:
        """Take a step and log it."""
        self.step += 1
        self.feed.add_record({"step": self.step, "timestamp": time.time(), **metrics})
        self.feed.update(global_step=self.step)

    def end(self, reason: str = "completed") -> None:
        """Report the end of training, as the callback does."""
        self.inbox.close("training has ended")
        self.feed.add_event("end", {"reason": reason, "step": self.step})

    def close(self) -> None:
        """Stop the server and remove the entry."""
        self._stopping.set()
        self._thread.join()
        self.server.stop()
        self._registration.close()

    def _jobs(self) -> dict[str, LiveJob]:
        return {self.job_id: self._job}

    def _train(self) -> None:
        while not self._stopping.wait(0.001):
            if self.inbox.has_new and not self.is_busy:
                for ticket in self.inbox.take():
                    self._apply(ticket)

    def _apply(self, ticket: Ticket) -> None:
        self.applied.append(ticket)
        if ticket.command == "set":
            self.feed.update(overrides={**self.feed.status["overrides"], ticket.data["key"]: ticket.data["value"]})
        if ticket.command in ("pause", "resume"):
            paused = ticket.command == "pause"
            self.feed.update(status="paused" if paused else "running", paused_by=ticket.author if paused else None)
        result: Any = RESULTS.get(ticket.command)
        if ticket.data.get("key") == "log_interval":
            result = {"key": "log_interval", "old": 10, "value": ticket.data["value"]}
        self.inbox.settle(ticket, "applied", step=self.step, result=result)


@contextmanager
def steered_job(*words: Any, **settings: Any) -> Iterator[SteeredJob]:
    """A job that is closed at the end."""
    job = SteeredJob(*words, **settings)
    try:
        yield job
    finally:
        job.close()


def commands_of(job: SteeredJob) -> list[tuple[str, dict[str, Any]]]:
    """What was applied: names and data."""
    return [(ticket.command, ticket.data) for ticket in job.applied]


assert set(RESULTS) <= set(COMMANDS)
