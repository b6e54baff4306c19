"""A job that serves itself: its feed is copied from its server, and commands are forwarded to it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from onstep.analysis.logs.files import FILE_NAME
from onstep.analysis.logs.run_status import ending_of
from onstep.control.commands import CommandError, CommandRefusedError
from onstep.control.feed import Feed
from onstep.control.inbox import Ticket
from onstep.control.registry import JobInfo, is_alive, is_here, read_info, read_token
from onstep.errors import MissingExtraError

if TYPE_CHECKING:
    import httpx

_SECONDS = 10.0
_POINTS = 10_000
_LISTED = "decision,evaluation,save,sample,command,status"
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
        import httpx

        try:
            with self._client() as client:
                self._load(client) if not self._is_loaded else self._follow(client)
        except httpx.HTTPError as error:
            if is_here(self.info) and not (is_alive(self.info) and read_info(self.job_id)):
                self._end(self._ending())
            else:
                self.feed.update(message=f"The job does not answer: {type(error).__name__}")

    def _load(self, client: httpx.Client) -> None:
        for event in self._events(client, _LISTED):
            self.feed.add_event(event["kind"], {"timestamp": event["timestamp"], **event["data"]})
        answer = self._get(client, f"metrics?points={_POINTS}")
        for name, series in answer["series"].items():
            for step, value, timestamp in zip(series["step"], series["value"], series["time"], strict=True):
                self.feed.history.add(step, timestamp, {name: math.nan if value is None else value})
                self._loaded_until = max(self._loaded_until, timestamp)
        self._is_loaded = True
        self._follow(client)

    def _follow(self, client: httpx.Client) -> None:
        status = self._get(client, "status")
        for event in self._events(client, None):
            self._take(event["kind"], {"timestamp": event["timestamp"], **event["data"]})
        if not self.feed.is_ended:
            self.feed.update(**{key: value for key, value in status.items() if key not in ("job_id", "timestamp")})

    def _take(self, kind: str, data: dict[str, Any]) -> None:
        if kind == "end":
            self.feed.update(status="ended", **{key: data[key] for key in ("reason",) if key in data})
            self.feed.add_event("end", data)
        elif kind not in ("metrics", "evaluation"):
            self.feed.add_event(kind, data)
        elif data["timestamp"] > self._loaded_until:
            self.feed.add_record(data)

    def _events(self, client: httpx.Client, kinds: str | None) -> Iterator[dict[str, Any]]:
        chosen = f"&kinds={kinds}" if kinds else ""
        while events := self._get(client, f"events?stream=0&after={self._last_id}{chosen}")["events"]:
            self._last_id = events[-1]["id"]
            yield from events

    def _get(self, client: httpx.Client, route: str) -> dict[str, Any]:
        content: dict[str, Any] = client.get(self._path(route)).raise_for_status().json()
        return content

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
        answer = await self._ask("POST", "control", {"command": command, "data": data})
        content = answer.json()
        if answer.status_code == 200:
            return Ticket(command, data, author, id=str(content["id"]))
        error = str(content.get("error") or content.get("detail") or f"the job answered {answer.status_code}")
        raise CommandError(error) if answer.status_code == 400 else CommandRefusedError(error)

    async def ticket(self, ticket_id: str) -> Ticket | None:
        """A forwarded command, as it is now."""
        answer = await self._ask("GET", f"commands/{quote(ticket_id, safe='')}", None)
        if answer.status_code != 200:
            return None
        content = answer.json()
        ticket = Ticket(content["command"], content["data"], content["author"], id=content["id"])
        for name in _TICKET_FIELDS:
            setattr(ticket, name, content[name])
        return ticket

    async def _ask(self, method: str, route: str, body: dict[str, Any] | None) -> httpx.Response:
        import httpx

        transport = httpx.AsyncHTTPTransport(uds=self.info.uds) if self.info.uds else None
        try:
            async with httpx.AsyncClient(transport=transport, **self._options()) as client:
                return await client.request(method, self._path(route), json=body)
        except httpx.HTTPError as error:
            state = "has ended" if self.feed.is_ended or not is_alive(self.info) else "does not answer"
            raise CommandRefusedError(
                f"the job {state} ({type(error).__name__}); try again, or look at its log."
            ) from error

    def _client(self) -> httpx.Client:
        try:
            import httpx
        except ImportError as error:
            raise MissingExtraError("The dashboard requires httpx: pip install 'onstep[control]'") from error
        transport = httpx.HTTPTransport(uds=self.info.uds) if self.info.uds else None
        return httpx.Client(transport=transport, **self._options())

    def _options(self) -> dict[str, Any]:
        token = read_token(self.job_id)
        headers = {"User-Agent": "dashboard"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # The server is this user's own, without TLS: no proxy of the environment is asked, no TLS context is made.
        return {
            "base_url": self.info.endpoint_url,
            "headers": headers,
            "timeout": _SECONDS,
            "trust_env": False,
            "verify": False,
        }

    def _path(self, route: str) -> str:
        return f"/jobs/{quote(self.job_id, safe='')}/{route}"
