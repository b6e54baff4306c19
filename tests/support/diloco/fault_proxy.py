"""Stands between a worker and its server, and does once what a network does now and then."""

from __future__ import annotations

import http.client
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

PATHS = {
    "Register": "/register",
    "Submit": "/submit_pseudograd",
    "Await": "/await",
    "Heartbeat": "/heartbeat",
    "Deregister": "/deregister",
}
Phase = Literal["before", "after"]
"""Before the server has the request, or after it has answered and before the worker has the answer."""


class Proxy:
    """Forwards requests to the address that `upstream` gives at that time.

    `at(kind, number, phase, act)` calls `act` once, at the given request of the kind (1 is the first); if it returns
    "lose", the worker gets no answer.
    """

    def __init__(self, upstream: Callable[[], tuple[str, int]], host: str = "127.0.0.1") -> None:
        self.upstream = upstream
        self.counts: Counter[str] = Counter()
        self.is_cut = False
        self.is_silent = False
        """Whether what is sent is swallowed: nobody is told anything."""
        self.loses_answers = False
        """Whether requests reach the server and their answers do not come back."""
        self.repeats_all = False
        """Whether every request is forwarded twice."""
        self._trigger: tuple[str, int, Phase, Callable[[Proxy, Forwarded], str | None]] | None = None
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"proxy": self})
        self._server = ThreadingHTTPServer((host, 0), handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign] # a worker that is killed hangs up
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self._server.server_address[:2]
        return f"{host!s}:{port}"

    def at(self, kind: str, number: int, phase: Phase, act: Callable[[Proxy, Forwarded], str | None]) -> None:
        self._trigger = (kind, number, phase, act)

    def swallow(self) -> None:
        """Keep a connection for as long as the line is silent."""
        while self.is_silent:
            time.sleep(0.05)

    def close(self) -> None:
        self.is_silent = False
        self._server.shutdown()
        self._server.server_close()

    def reached(self, kind: str, phase: Phase, forwarded: Forwarded) -> str | None:
        """What is to be done at this point."""
        with self._lock:
            trigger = self._trigger
            if trigger is None or trigger[0] != kind or trigger[2] != phase or self.counts[kind] < trigger[1]:
                return None
            self._trigger = None
        self.counts["faults"] += 1
        return trigger[3](self, forwarded)


class Forwarded:
    """A request that can be sent to the server, and sent again."""

    def __init__(self, proxy: Proxy, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self._proxy = proxy
        self._method, self._path, self._headers, self._body = method, path, headers, body

    def send(self) -> tuple[int, list[tuple[str, str]], bytes]:
        """The server's answer.

        Raises:
            OSError: if it gives none, or a broken one.
        """
        host, port = self._proxy.upstream()
        connection = http.client.HTTPConnection(host, port, timeout=60)
        try:
            connection.request(self._method, self._path, self._body, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        except (http.client.HTTPException, ValueError) as error:
            raise ConnectionError(str(error)) from error
        finally:
            connection.close()

    def send_later(self, seconds: float) -> None:
        """Send it in a while, when newer requests have overtaken it; nobody waits for the answer."""

        def again() -> None:
            with suppress(OSError):
                self.send()

        timer = threading.Timer(seconds, again)
        timer.daemon = True
        timer.start()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", "0")))
        kind = next((kind for kind, path in PATHS.items() if path == self.path), self.path)
        proxy = self.proxy
        proxy.counts[kind] += 1
        forwarded = Forwarded(proxy, self.command, self.path, dict(self.headers.items()), body)
        self.close_connection = True
        with suppress(OSError):
            if proxy.is_silent:
                proxy.swallow()
                return
            if proxy.reached(kind, "before", forwarded) == "lose" or proxy.is_cut:
                return
            if proxy.repeats_all and kind != "Await":
                forwarded.send_later(0.0)
            status, headers, content = forwarded.send()
            if proxy.is_silent:
                proxy.swallow()
                return
            if proxy.reached(kind, "after", forwarded) == "lose" or proxy.is_cut or proxy.loses_answers:
                return
            self._answer(status, headers, content)

    do_GET = do_POST

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Be quiet."""
