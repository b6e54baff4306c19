"""Answers the requests about jobs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from onstep.commands import COMMANDS
from onstep.control.commands import CommandError, CommandRefusedError
from onstep.control.feed import KINDS
from onstep.control.inbox import Ticket
from onstep.control.serving.event_streams import stream
from onstep.control.serving.limits import MOST_POINTS, MOST_STREAMS, MOST_WAIT_SECONDS
from onstep.control.serving.prometheus import CONTENT_TYPE, prometheus_text
from onstep.control.serving.served_job import ServedJob
from onstep.files.bounded_reading import brief
from onstep.http.messages import (
    RefusedError,
    answer,
    choice,
    json_object,
    number,
    refusal,
    strict_json,
    whole_number,
)

_FIRST_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.01, 0.2
_MOST_EVENT_ID = 2**53


class JobRoutes:
    """The routes of jobs.

    Args:
        jobs: gives the jobs that are served, by id.
        listed: gives the jobs that are known, as JSON.
    """

    def __init__(self, jobs: Callable[[], Mapping[str, ServedJob]], listed: Callable[[], list[dict[str, Any]]]) -> None:
        self._jobs = jobs
        self._listed = listed
        self._streams = 0

    async def listing(self, request: Request) -> Response:
        """GET /jobs"""
        served = self._jobs()
        return answer({"jobs": [{**one, "is_served": one.get("job_id") in served} for one in self._listed()]})

    async def status(self, request: Request) -> Response:
        """GET /jobs/{job_id}/status"""
        job = self._job(request)
        return answer({**job.feed.latest, "timestamp": time.time(), **job.feed.status, "job_id": job.job_id})

    async def metrics(self, request: Request) -> Response:
        """GET /jobs/{job_id}/metrics"""
        history = self._job(request).feed.history
        await asyncio.to_thread(history.refresh)
        names = history.names()
        points = whole_number(request, "points", 1000, 10, 10_000) or 1000
        since = whole_number(request, "since_step", None, -1, _MOST_EVENT_ID)
        wanted = choice(request, "names")
        chosen = names if wanted is None else [name for name in names if name in wanted]
        points = min(points, max(10, MOST_POINTS // max(1, len(chosen))))
        about = {"job_id": request.path_params["job_id"], "names": names, "num_points": history.num_points()}

        async def pieces() -> AsyncIterator[str]:
            yield f'{strict_json(about)[:-1]}, "series": {{'
            for index, name in enumerate(chosen):
                curve = strict_json(history.series([name], points, since)[name])
                yield f"{', ' if index else ''}{strict_json(name)}: {curve}"
                await asyncio.sleep(0)  # other requests, and the training thread, have their turn between two curves
            yield "}}"

        return StreamingResponse(pieces(), media_type="application/json")

    async def events(self, request: Request) -> Response:
        """GET /jobs/{job_id}/events"""
        feed = self._job(request).feed
        kinds = choice(request, "kinds")
        if kinds is not None and not kinds <= set(KINDS):
            raise RefusedError(400, f"kinds must be of {', '.join(KINDS)}, got {', '.join(sorted(kinds))[:80]!r}.")
        after = whole_number(request, "after", 0, 0, _MOST_EVENT_ID) or 0
        last = request.headers.get("last-event-id", "")
        if last.isascii() and last.isdigit() and len(last) < 17:
            after = int(last)
        if whole_number(request, "stream", 1, 0, 1) == 0:
            return answer({"events": [event.to_dict() for event in feed.events_after(after, kinds)]})
        if feed.is_ended and not feed.events_after(after, kinds, 1):
            return Response(status_code=204)  # tells a browser not to connect again
        if self._streams >= MOST_STREAMS:
            return refusal(503, f"{MOST_STREAMS} event streams are open, the most there can be.", {"Retry-After": "5"})
        return StreamingResponse(self._counted(stream(feed, after, kinds)), media_type="text/event-stream")

    async def control(self, request: Request) -> Response:
        """POST /jobs/{job_id}/control"""
        job = self._job(request)
        body = await json_object(request)
        if unknown := sorted(body.keys() - {"command", "data", "wait"}):
            raise RefusedError(
                400,
                f"The body has {unknown[0][:80]!r}, but may only have command, data and wait; parameters go into data.",
            )
        seconds = _wait(body.get("wait"))
        author = _author(request)
        try:
            ticket = await job.submit(body.get("command"), body.get("data"), author)  # type: ignore[arg-type]
        except CommandRefusedError as error:
            return refusal(409, str(error))
        except CommandError as error:
            valid = _command_names(job)
            more: dict[str, Any] = {} if body.get("command") in valid else {"valid_commands": valid}
            return refusal(400, str(error), **more)
        told = {
            "status": "acknowledged",
            "command": ticket.command,
            "timestamp": time.time(),
            "message": f"Command {ticket.command} queued for execution",
            "id": ticket.id,
        }
        if seconds:
            told["ticket"] = (await _settled(job, ticket, seconds)).to_dict()
        return answer(told)

    async def command(self, request: Request) -> Response:
        """GET /jobs/{job_id}/commands/{id}"""
        job = self._job(request)
        seconds = number(request, "wait", 0.0, 0.0, MOST_WAIT_SECONDS) or 0.0
        ticket = await job.ticket(request.path_params["id"])
        if ticket is None:
            return refusal(404, "There is no such command; only the newest 1,000 are known.")
        return answer((await _settled(job, ticket, seconds)).to_dict())

    async def prometheus(self, request: Request) -> Response:
        """GET /metrics"""
        jobs = self._jobs().values()
        text = prometheus_text([(job.job_id, job.feed.latest, job.feed.status) for job in jobs])
        return Response(text.encode("utf-8", "replace"), headers={"Content-Type": CONTENT_TYPE})

    def _job(self, request: Request) -> ServedJob:
        jobs = self._jobs()
        job = jobs.get(request.path_params["job_id"])
        if job is None:
            raise RefusedError(404, "There is no such job on this server.", jobs=list(jobs))
        return job

    async def _counted(self, texts: Any) -> Any:
        self._streams += 1
        try:
            async for text in texts:
                yield text
        finally:
            self._streams -= 1


def _wait(seconds: Any) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if seconds is None:
        return 0.0
    if not is_number or not 0 <= seconds <= MOST_WAIT_SECONDS:
        rule = f"a number of seconds from 0 to {MOST_WAIT_SECONDS:g}"
        raise RefusedError(400, f"wait must be {rule}, got {brief(seconds, 80)}.")
    return float(seconds)


async def _settled(job: ServedJob, ticket: Ticket, seconds: float) -> Ticket:
    """A command once it is settled, or as it is after so many seconds."""
    deadline, look = time.monotonic() + seconds, _FIRST_LOOK_SECONDS
    while ticket.status == "queued" and (left := deadline - time.monotonic()) > 0:
        await asyncio.sleep(min(look, left))
        look = min(1.5 * look, _LONGEST_LOOK_SECONDS)
        ticket = await job.ticket(ticket.id) or ticket
    return ticket


def _command_names(job: ServedJob) -> list[str]:
    described = job.feed.status.get("commands") or []
    return [one["name"] for one in described if isinstance(one, dict) and "name" in one] or list(COMMANDS)


def _author(request: Request) -> str:
    """Who sent a command, for the log of decisions: the user as the client names it, the program, and from where."""
    program = request.scope.get("onstep.author", "http")
    if program != "browser":
        program = _printable(request.headers.get("user-agent", "").split("/")[0].split(" ")[0]) or program
    user = _printable(request.headers.get("x-onstep-user", ""))
    client = request.client
    where = f" at {client.host}" if client is not None and client.host else ""
    return f"{user} with {program}{where}" if user else f"{program}{where}"


def _printable(text: str) -> str:
    return "".join(one for one in text if one.isascii() and one.isprintable())[:40].strip()
