"""The client of running jobs over HTTP or Unix sockets."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

from onstep.analysis.text_tables import printable
from onstep.config.suggestions import listed, nearest, shown
from onstep.control.client.connection import TIMEOUT_SECONDS, Connection, ControlError, field_of
from onstep.control.client.event_stream import follow
from onstep.control.client.interface import ControlResponse, TrainerControlClient
from onstep.control.feed import FeedEvent
from onstep.control.registry import JobInfo, describe_jobs, is_alive, is_here, is_job_id, list_infos, read_token
from onstep.errors import ConfigError
from onstep.http.addresses import ANY, LOOPBACK, authority

_MOST_WAIT_SECONDS = 60.0
"""The longest that a server waits before it answers."""
_MOST_EVENTS = 100_000
"""More than a job keeps."""


class HTTPTrainerControlClient(TrainerControlClient):
    """Talks to the control servers of running jobs.

    Without arguments, to all jobs of this user on this machine; address and token of each are read from the registry at
    every request, so a job that was started again is found. With `host` and `port`, to that server alone.

    Args:
        host: a machine on the network, or this one at the near end of `ssh -L`.
        port: the port of the job's server, or of a dashboard.
        token: the server's token; read it from a file, not from a command line, which other users see.
        timeout: seconds for an answer.

    Raises:
        MissingExtraError: at the first request, if httpx is not installed.
    """

    def __init__(
        self,
        host: str | None = None,
        port: int | None = None,
        token: str | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        if (host is None) != (port is None):
            raise ConfigError(f"host and port go together, got host={host!r} and port={port!r}; pass both or neither.")
        if host is None and token is not None:
            raise ConfigError(
                "token is for a server given by host and port; the tokens of local jobs are in the registry."
            )
        self._timeout = timeout
        self._remote = (
            None if host is None else Connection(f"http://{authority(host, port or 0)}", None, token, timeout)
        )

    def send_command(
        self, job_id: str, command: str, data: dict[str, Any] | None = None, wait: float | None = None
    ) -> ControlResponse:
        is_number = isinstance(wait, int | float) and not isinstance(wait, bool)
        if wait is not None and not (is_number and wait >= 0):
            return ControlResponse(False, f"wait must be a number of seconds >= 0, or None, got {shown(wait)}.")
        body: dict[str, Any] = {"command": command, "data": {} if data is None else data}
        seconds = 0.0 if wait is None else min(wait, _MOST_WAIT_SECONDS)
        if wait is not None:
            body["wait"] = seconds
        begun = time.monotonic()
        try:
            connection = self._at(job_id)
            answer = connection.post(job_path(job_id, "control"), body, seconds)
            ticket_id = field_of(answer, "id", str, connection)
        except ControlError as error:
            return ControlResponse(False, str(error))
        if wait is None:
            return ControlResponse(True, str(answer.get("message", "")), answer)
        ticket = answer.get("ticket") or answer
        left = wait - (time.monotonic() - begun)
        if ticket.get("status") != "queued" or left <= 0:
            return _outcome(ticket)
        return self.wait(job_id, ticket_id, left)

    def wait(self, job_id: str, ticket_id: str, timeout: float | None = None) -> ControlResponse:
        """Wait until the job has applied or refused a command; `ticket_id` is the `id` of the answer to it.

        Args:
            job_id: the job.
            ticket_id: the `id` in the data of an earlier response.
            timeout: seconds; None waits without limit.
        """
        deadline = time.monotonic() + (math.inf if timeout is None else timeout)
        path = job_path(job_id, "commands", ticket_id)
        while True:
            seconds = max(0.0, min(_MOST_WAIT_SECONDS, deadline - time.monotonic()))
            try:
                ticket = self._at(job_id).get(path, {"wait": seconds}, seconds)
            except ControlError as error:
                return ControlResponse(False, f"the outcome of the command is unknown: {error}")
            if ticket.get("status") != "queued" or time.monotonic() >= deadline:
                return _outcome(ticket)

    def get_status(self, job_id: str) -> dict[str, Any]:
        """The newest record and the status of a job; `{"error", "job_id", "status": "unknown"}` if it cannot be read.

        Raises:
            ConfigError: if there is no such job.
        """
        try:
            status: dict[str, Any] = self._at(job_id).get(job_path(job_id, "status"))
        except ControlError as error:
            return {"error": str(error), "job_id": job_id, "status": "unknown"}
        return status

    def list_jobs(self) -> list[JobInfo]:
        """The jobs that are registered, newest first; some may have died without removing their entry."""
        return [JobInfo.from_dict(one) for one in self.described_jobs()]

    def described_jobs(self) -> list[dict[str, Any]]:
        """The jobs as JSON, newest first: the fields of `JobInfo`, `alive`, and `is_here` for the server's machine.

        Raises:
            ControlError: if a remote server cannot be reached or refuses.
        """
        if self._remote is None:
            return describe_jobs()
        jobs = field_of(self._remote.get("/jobs"), "jobs", list, self._remote)
        infos = [(_info(one), one) for one in jobs if isinstance(one, dict) and is_job_id(one.get("job_id"))]
        infos.sort(key=lambda each: each[0].started_at or 0.0, reverse=True)
        flags = ("alive", "is_here")
        return [{**info.to_dict(), **{flag: bool(one.get(flag, True)) for flag in flags}} for info, one in infos]

    def metrics(
        self,
        job_id: str,
        names: Sequence[str] | None = None,
        points: int = 1000,
        since_step: int | None = None,
    ) -> dict[str, Any]:
        """The history of metrics, downsampled to about `points` a curve, minimum and maximum kept.

        Returns `{"names", "num_points", "series": {name: {"step": [...], "value": [...], "time": [...]}}}`.

        Args:
            job_id: the job: its id, the beginning of one, or the name of its run.
            since_step: only points after this step; None for all.

        Raises:
            ControlError: if the job cannot be reached or refuses.
        """
        parameters: dict[str, Any] = {"points": points}
        if names is not None:
            parameters["names"] = ",".join(names)
        if since_step is not None:
            parameters["since_step"] = since_step
        history: dict[str, Any] = self._at(job_id).get(job_path(job_id, "metrics"), parameters)
        return history

    def events(self, job_id: str, after: int = 0, kinds: Sequence[str] | None = None) -> Iterator[FeedEvent]:
        """What the job reports from event `after` on, until it ends; reconnects after a lost connection.

        The last event has the kind `end`.

        Args:
            job_id: the job.
            after: the number of the last event that is known; 0 begins with the oldest that the job still has.
            kinds: metrics, evaluation, decision, save, sample, command, status; None for all.

        Raises:
            ControlError: if the job cannot be reached any more without having reported its end.
        """
        wanted = None if kinds is None else ",".join(kinds)
        return follow(lambda: self._at(job_id), job_path(job_id, "events"), after, wanted)

    def past_events(self, job_id: str, after: int = 0, kinds: Sequence[str] | None = None) -> list[FeedEvent]:
        """The events that the job has kept, up to now.

        Args:
            job_id: the job: its id, the beginning of one, or the name of its run.
            after: only events with a number above this one.
            kinds: only events of these kinds; None for all.

        Raises:
            ControlError: if the job cannot be reached or refuses.
        """
        parameters = {"stream": 0, **({} if kinds is None else {"kinds": ",".join(kinds)})}
        found: list[FeedEvent] = []
        while True:
            connection = self._at(job_id)
            answer = connection.get(job_path(job_id, "events"), {**parameters, "after": after})
            page = field_of(answer, "events", list, connection)
            if not page:
                return found
            try:
                found += (FeedEvent(one["id"], one["kind"], one["timestamp"], one["data"]) for one in page)
            except (KeyError, TypeError):
                found = []
            if not found or not isinstance(found[-1].id, int) or found[-1].id <= after or len(found) > _MOST_EVENTS:
                raise ControlError(f"{connection.place} did not give its events in order; is it a control server?")
            after = found[-1].id

    def login_link(self, job_id: str) -> str:
        """A link to the job's page that works once, within a minute, and has no token in it.

        Args:
            job_id: the job: its id, the beginning of one, or the name of its run.

        Raises:
            ControlError: if the job cannot be reached, or its server listens on a Unix socket.
        """
        connection = self._at(job_id)
        if connection.uds is not None:
            raise ControlError(
                f"the server of {job_id} listens on the Unix socket {connection.uds}, which browsers cannot open; "
                "start the job without uds=True, or use `onstep dashboard`."
            )
        path = field_of(connection.post("/login-links", {}), "path", str, connection)
        if not re.fullmatch(r"/login/[\w-]+", path, re.ASCII):  # it could lead elsewhere: http://host@elsewhere/
            raise ControlError(f"{connection.place} did not give a login link; is it a control server?")
        return f"{connection.url}{path}"

    def _at(self, job_id: str) -> Connection:
        """The server of a job.

        Raises:
            ConfigError: if there is no such job.
            ControlError: if it has died, or cannot be reached from this machine.
        """
        return self._remote or local_connection(job_id, self._timeout)


def _info(content: dict[str, Any]) -> JobInfo:
    """A job as another machine describes it, without what could control the terminal."""
    texts = {key: printable(value) for key, value in content.items() if isinstance(value, str)}
    return JobInfo.from_dict({**content, **texts})


def local_connection(job_id: str, timeout: float = TIMEOUT_SECONDS) -> Connection:
    """The server of a job in the registry of this user.

    Raises:
        ConfigError: if there is no such job; the message names those that there are.
        ControlError: if it has died, or listens where this machine cannot reach it.
    """
    infos = {info.job_id: info for info in list_infos()}
    if job_id not in infos:
        names = list(infos)
        there = f"; registered: {listed(names, 10)}" if names else "; no job is registered"
        raise ConfigError(f"there is no job {job_id!r}{there}.{nearest(job_id, names)}")
    info = infos[job_id]
    if is_here(info) and not is_alive(info):
        raise ControlError(
            f"{job_id} has ended: its process {info.pid} is gone; `onstep control cleanup` removes its entry."
        )
    if not is_here(info) and (info.uds is not None or info.host in LOOPBACK):
        raise ControlError(_elsewhere(info))
    is_any = not is_here(info) and info.host in ANY
    url = f"http://{authority(info.hostname, info.port)}" if is_any else info.endpoint_url
    return Connection(url, info.uds, read_token(job_id), timeout)


def _elsewhere(info: JobInfo) -> str:
    if info.uds is not None:
        return f"{info.job_id} runs on {info.hostname} and listens on a Unix socket there; log in there to steer it."
    port = info.port
    return (
        f"{info.job_id} runs on {info.hostname} and listens on {info.host} there; run this command there, or "
        f"`ssh -L {port}:{info.host}:{port} {info.hostname}` and use --remote 127.0.0.1:{port} --token-file FILE."
    )


def job_path(job_id: str, *parts: str) -> str:
    """The path of a job's route; the parts are quoted."""
    return "/".join(["/jobs", *(quote(part, safe="") for part in (job_id, *parts))])


def _outcome(ticket: dict[str, Any]) -> ControlResponse:
    command, status, message = ticket.get("command"), ticket.get("status"), str(ticket.get("message") or "")
    if status == "applied":
        step = "" if ticket.get("step") is None else f" at step {ticket['step']}"
        return ControlResponse(True, f"{command}: applied{step}" + (f"; {message}" if message else ""), ticket)
    if status == "refused":
        return ControlResponse(False, message or f"{command}: refused", ticket)
    return ControlResponse(False, f"{command}: still queued (id {ticket.get('id')}); it may yet be applied", ticket)
