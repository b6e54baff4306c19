"""A job that serves itself: its feed is copied from its server, and commands are forwarded to it."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from onstep.analysis.logs.files import FILE_NAME
from onstep.analysis.logs.run_status import ending_of
from onstep.control.client.connection import ControlError
from onstep.control.client.http_client import HTTPTrainerControlClient, job_path, local_connection
from onstep.control.commands import CommandError, CommandRefusedError
from onstep.control.feed import Feed, FeedEvent
from onstep.control.history import History
from onstep.control.inbox import Ticket
from onstep.control.registry import JobInfo, is_alive, is_here, read_info
from onstep.errors import ConfigError

_SECONDS = 10.0
_POINTS = 10_000
_LISTED = ("decision", "evaluation", "save", "sample", "command", "status")
_TICKET_FIELDS = ("step", "applied_at", "status", "message", "result", "received_at")


class RemoteJob:
    """A `ServedJob` whose own server does the work. Its token stays here: a browser never gets it.

    Args:
        info: where its server is, of the registry.
    """

    def __init__(self, info: JobInfo) -> None:
        self.info = info
        self.job_id = info.job_id
        self.feed = Feed()
        self.feed.update(status="loading", run=info.job_id, output_dir=info.output_dir)
        self._client = HTTPTrainerControlClient(timeout=_SECONDS)
        self._last_id = 0
        self._is_loaded = False
        self._loaded_until = float("-inf")

    def describe(self) -> dict[str, Any]:
        """Its endpoint, `alive` and `is_here`, as JSON."""
        status = self.feed.status
        alive = not self.feed.is_ended
        known: dict[str, Any] = {
            key: status[key] for key in ("run", "status") if status.get(key) not in (None, "loading")
        }
        return {**self.info.to_dict(), **known, "alive": alive, "is_here": True}

    def refresh(self) -> None:
        """Copy what is new; called by one thread."""
        if self.feed.is_ended:
            return
        try:
            self._follow() if self._is_loaded else self._load()
        except (ControlError, ConfigError) as error:  # it does not answer, or has no entry any more
            if is_here(self.info) and not (is_alive(self.info) and read_info(self.job_id)):
                self._end(self._ending())
            else:
                self.feed.update(message=f"The job does not answer: {error}")

    def _load(self) -> None:
        for event in self._events(_LISTED):
            self.feed.add_event(event.kind, {"timestamp": event.timestamp, **event.data})
        self._load_curves()
        self._is_loaded = True
        self._follow()

    def _load_curves(self) -> None:
        """Replace all curves by those of the job."""
        history = History()
        for name, series in self._client.metrics(self.job_id, points=_POINTS)["series"].items():
            for step, value, timestamp in zip(series["step"], series["value"], series["time"], strict=True):
                point = {"step": step, "timestamp": timestamp, name: math.nan if value is None else value}
                history.add_record(point)
                self._loaded_until = max(self._loaded_until, timestamp)
        self.feed.history = history

    def _follow(self) -> None:
        status = local_connection(self.job_id, _SECONDS).get(job_path(self.job_id, "status"))
        news = self._events()
        for event in news:
            self._take(event.kind, {"timestamp": event.timestamp, **event.data})
        if any(event.data.get("flag") == "rolled_back" for event in news):
            self._load_curves()
        if not self.feed.is_ended:
            self.feed.update(**{key: value for key, value in status.items() if key not in ("job_id", "timestamp")})

    def _events(self, kinds: tuple[str, ...] | None = None) -> list[FeedEvent]:
        found = self._client.past_events(self.job_id, self._last_id, kinds)
        self._last_id = found[-1].id if found else self._last_id
        return found

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "end":
            self.feed.update(status="ended", **{key: data[key] for key in ("reason",) if key in data})
            self.feed.add_event("end", data)
        elif kind not in ("metrics", "evaluation"):
            self.feed.add_event(kind, data)
        elif data["timestamp"] > self._loaded_until:
            self.feed.add_record(data)

    def _ending(self) -> str:
        """Why the job no longer answers, by the files of its run."""
        places = [place for place in (self.info.logging_dir, self.info.output_dir) if place]
        found = (ending_of(Path(place) / FILE_NAME) for place in places)
        return next((ending for ending in found if ending), "its process has ended")

    def _end(self, why: str) -> None:
        self.feed.update(status="ended", reason=why)
        self.feed.add_event("end", {"reason": why})

    async def submit(self, command: str, data: dict[str, Any], author: str) -> Ticket:
        """Forward a command.

        Raises:
            CommandError: if the job finds it unknown or its data unfit.
            CommandRefusedError: if the job refuses it or does not answer.
        """
        try:
            answer = await self._ask("control", {"command": command, "data": data})
        except ControlError as error:
            said = str(error).removeprefix(f"HTTP {error.status}: ")
            raise CommandError(said) if error.status == 400 else CommandRefusedError(said) from error
        return Ticket(command, data, author, id=str(answer["id"]))

    async def ticket(self, ticket_id: str) -> Ticket | None:
        """A forwarded command, as it is now."""
        try:
            content = await self._ask(f"commands/{ticket_id}")
        except ControlError as error:
            if error.status is None:
                raise CommandRefusedError(str(error)) from error
            return None
        ticket = Ticket(content["command"], content["data"], content["author"], id=content["id"])
        for name in _TICKET_FIELDS:
            setattr(ticket, name, content[name])
        return ticket

    async def _ask(self, route: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            connection = replace(local_connection(self.job_id, _SECONDS), program="dashboard")
        except ConfigError as error:  # it has no entry any more
            raise ControlError(str(error)) from error
        path = job_path(self.job_id, *route.split("/"))
        if body is None:
            return await asyncio.to_thread(connection.get, path)
        return await asyncio.to_thread(connection.post, path, body)
