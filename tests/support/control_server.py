"""A control server over a real socket, with a job that nobody trains, and clients that speak raw bytes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from onstep.control.feed import Feed
from onstep.control.inbox import Inbox
from onstep.control.registry import JobInfo, describe_jobs
from onstep.control.serving.app import build_app
from onstep.control.serving.served_job import LiveJob
from onstep.control.serving.server import ControlServer
from onstep.http.access import Access
from tests.support.waiting import PATIENCE

TOKEN = "5f" * 32


@dataclass
class Served:
    """A server, its job, and how to reach it."""

    server: ControlServer
    feed: Feed
    inbox: Inbox
    access: Access
    url: str

    def client(self, **settings: Any) -> httpx.Client:
        """A client with the token."""
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE, **settings
        )

    def stranger(self, **settings: Any) -> httpx.Client:
        """A client without a token."""
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **settings)

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=PATIENCE)

    def raw(self, request: bytes) -> bytes:
        """What the server answers to these bytes, until it closes the connection or falls silent."""
        with self.connect() as connection:
            connection.sendall(request)
            return received(connection)

    def raw_status(self, request: bytes) -> int:
        """The status of the answer to these bytes."""
        with self.connect() as connection:
            connection.sendall(request)
            return status_of(received(connection, b"\r\n\r\n"))


@contextmanager
def served(job_id: str = "job", *, token: str | None = TOKEN, **settings: Any) -> Iterator[Served]:
    """Serve one job on a free port."""
    access = Access(token) if "uds" not in settings else Access(token, None)
    feed, inbox, jobs = Feed(), Inbox(), {}
    app = build_app(lambda: jobs, access=access, listed=describe_jobs, title="a job")
    server = ControlServer(app, **{"port": 0, **settings})
    info = JobInfo.of_this_process(job_id, host=server.host, port=server.port)
    jobs[job_id] = LiveJob(info, feed, inbox, {"own": "A callback's command"})
    server.start()
    try:
        yield Served(server, feed, inbox, access, info.endpoint_url)
    finally:
        server.stop()


def received(connection: socket.socket, enough: bytes | None = None) -> bytes:
    """What arrives until the connection ends, or until these bytes have."""
    text = b""
    try:
        while (enough is None or enough not in text) and (piece := connection.recv(65536)):
            text += piece
    except ConnectionResetError:
        pass
    return text


def status_of(answer: bytes) -> int:
    """The status code of a raw answer; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
