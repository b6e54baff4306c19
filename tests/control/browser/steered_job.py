"""A job with a server and a page, whose training is a thread that takes commands as the training thread does."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

from onstep.commands import COMMANDS
from onstep.control.commands import CommandRefusedError
from onstep.control.feed import Feed
from onstep.control.inbox import Inbox, Ticket
from onstep.control.registry import JobInfo
from onstep.control.serving.app import build_app
from onstep.control.serving.served_job import LiveJob
from onstep.control.serving.server import ControlServer
from onstep.http.access import Access, names_of

TOKEN = "a-token-for-tests"
ENDING = ("graceful_stop", "save_and_stop", "abort")


class SteeredJob:
    """Takes commands at its "steps", which `step` or the thread of `train` makes."""

    def __init__(self, job_id: str = "first-run", *, run: str | None = None) -> None:
        self.feed, self.inbox = Feed(), Inbox(self._check)
        self.step_number = 0
        self.taken: list[tuple[str, dict[str, Any]]] = []
        info = JobInfo(job_id, "127.0.0.1", 0, None, time.time())
        self.served = LiveJob(info, self.feed, self.inbox, {"dump_router": "Write the router's choices to a file"})
        own = {"name": "dump_router", "help": "Write the router's choices", "parameters": [], "warning": ""}
        lr = {"kind": "number", "minimum": 0, "value": 1.0, "configured": 1.0, "help": "Multiplies the learning rate"}
        logs = {"kind": "integer", "minimum": 1, "value": 10, "configured": 10, "help": "Steps between records"}
        self.feed.update(
            status="running", run=run or job_id, output_dir=f"runs/{job_id}", max_steps=400, world_size=2,
            started_at=time.time(), checkpoints=[20, 40], settable={"lr_factor": lr, "logging_steps": logs},
            commands=[*(one.describe() for one in COMMANDS.values()), own], overrides={},
            memory=[{"rank": rank, "rss_bytes": (rank + 5) << 27, "peak_device_bytes": None} for rank in (0, 1)],
        )  # fmt: skip
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def _check(self, command: str, data: dict[str, Any]) -> None:
        if command == "rollback" and data["step"] not in (None, 20, 40):
            raise CommandRefusedError(f"rollback: there is no checkpoint of step {data['step']}.")

    def step(self, number: int = 1) -> None:
        """Make a few steps: take the commands, log a record."""
        for _ in range(number):
            self._take_commands()
            if self.feed.status["status"] == "paused":
                continue
            self.step_number += 1
            step = self.step_number
            loss = 6.0 * math.exp(-step / 80) + 1.5 + 0.1 * math.sin(step)
            self.feed.add_record(
                {"global_step": step, "timestamp": time.time(), "epoch": step / 200, "loss": loss,
                 "learning_rate": 3e-4, "grad_norm": 1.0 + 1 / step, "tok_per_sec": 51_000 + step % 7}
            )  # fmt: skip
            self.feed.update(global_step=step, progress=step / 400, eta_seconds=400.0 - step, steps_per_second=20.0)

    def train(self, seconds_per_step: float = 0.02) -> None:
        """Make steps in a thread until `close`."""

        def work() -> None:
            while not self._is_over.wait(seconds_per_step):
                self.step()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _take_commands(self) -> None:
        for ticket in self.inbox.take():
            self.taken.append((ticket.command, ticket.data))
            result = self._apply(ticket)
            self.inbox.settle(ticket, "applied", step=self.step_number, result=result)
            self.feed.add_event("command", ticket.to_dict())

    def _apply(self, ticket: Ticket) -> Any:
        command, data = ticket.command, ticket.data
        if command in ("pause", "resume"):
            self.feed.update(status="paused" if command == "pause" else "running", paused_by=ticket.author)
        elif command == "set":
            self._set(data["key"], data["value"], ticket.author)
        elif command == "generate":
            return [{"prompt": prompt, "text": " and so on"} for prompt in data["prompts"]]
        elif command == "stacks":
            return {"rank 0": 'File "loop.py", line 1, in run\n  train()', "rank 1": 'File "loop.py", line 2'}
        elif command in ENDING:
            self.feed.update(status="ended", reason=f"{command} by {ticket.author}")
            self.inbox.close("training has ended.")
        return None

    def _set(self, key: str, value: float | None, author: str) -> None:
        settable = {name: dict(one) for name, one in self.feed.status["settable"].items()}
        old = settable[key]["value"]
        settable[key]["value"] = settable[key]["configured"] if value is None else value
        self.feed.update(settable=settable)
        decision = {"step": self.step_number, "flag": "set", "author": author, "reason": "asked for by hand"}
        self.feed.add_event(
            "decision", {**decision, "details": {"key": key, "old": old, "new": settable[key]["value"]}}
        )


class Served:
    """A server over jobs, and what opens it."""

    def __init__(self, *jobs: SteeredJob, port: int = 0) -> None:
        by_id = {job.served.job_id: job.served for job in jobs}
        self.access = Access(TOKEN, names_of("127.0.0.1"))
        listed = [job.served.describe() for job in jobs]
        app = build_app(lambda: by_id, access=self.access, listed=lambda: listed, title="Onstep")
        self.server = ControlServer(app, port=port)
        self.server.start()
        self.url = f"http://127.0.0.1:{self.server.port}"

    def new_link(self) -> str:
        """A link that lets a browser in, once."""
        return f"{self.url}/login/{self.access.new_link()}"

    def close(self) -> None:
        """End the server."""
        self.server.stop()
