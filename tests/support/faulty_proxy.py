"""A proxy in front of an HTTP server that loses, delays, repeats, cuts and refuses requests."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal
from urllib.parse import urlsplit

Fault = Literal["pass", "wait", "drop", "lose the answer", "twice", "cut", "500", "503", "stop before", "stop after"]
"""Forward it, also once `Proxy.go` is set; close the connection without, or after forwarding; forward it twice; forward
half of it; answer with an error (503 with `Retry-After`); call `Proxy.strike` and then close the connection, without or
after forwarding."""
FAULTS: tuple[Fault, ...] = ("drop", "lose the answer", "twice", "cut", "500", "503")
"""Those of a network and of a server."""


@dataclass
class Proxy:
    """What happens to the requests."""

    url: str = ""
    decide: Callable[[int, str, str], Fault] = lambda number, method, path: "pass"
    """Given the number of the request from 0, its method and its path."""
    strike: Callable[[], object] = lambda: None
    is_dead: bool = False
    """Whether every connection is closed at once."""
    go: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def faulty_proxy(address: str) -> Iterator[Proxy]:
    """Forward to `address`; yields the proxy, whose `url` clients use."""
    proxy, target = Proxy(), urlsplit(address)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            self.close_connection = True
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with proxy.turn:
                number = len(proxy.requests)
                proxy.requests.append(f"{self.command} {self.path}")
            fault = "drop" if proxy.is_dead else proxy.decide(number, self.command, self.path)
            if fault == "wait":
                proxy.go.wait()
            if fault == "stop before":
                proxy.strike()
            if fault in ("drop", "stop before"):
                return
            if fault in ("500", "503"):
                pause = [("Retry-After", "1")] if fault == "503" else []
                self._answer(int(fault), pause, b"<Error><Code>SlowDown</Code></Error>")
                return
            if fault == "cut":
                self._forward_half(body)
                return
            answers = [self._forward(body) for _ in range(2 if fault == "twice" else 1)]
            if fault == "stop after":
                proxy.strike()
            if fault not in ("lose the answer", "stop after"):
                self._answer(*answers[0])

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(target.hostname or "", target.port)
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), content

        def _forward_half(self, body: bytes) -> None:
            with socket.create_connection((target.hostname or "", target.port or 0)) as one:
                lines = [f"{self.command} {self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in self.headers.items())]
                one.sendall("\r\n".join([*lines, "", ""]).encode() + body[: len(body) // 2])

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
            self.send_response_only(status)
            length = str(len(content))
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif name.lower() not in ("connection", "transfer-encoding", "content-length"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(b"" if self.command == "HEAD" else content)

        def log_message(self, *_: object) -> None:
            return

        def handle_one_request(self) -> None:
            with suppress(OSError):
                super().handle_one_request()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    proxy.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield proxy
    finally:
        proxy.go.set()
        server.shutdown()
        server.server_close()
