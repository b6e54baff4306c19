"""The proxy that stands in for thin lines when simulated rounds are compared with real ones."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.support.waiting import PATIENCE
from throttled_proxy import ThrottledProxy


class _Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def echo_port() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_bytes_pass_unchanged_on_one_connection_and_on_several(echo_port: int) -> None:
    bodies = [bytes([number]) * 100_003 for number in range(4)]
    with ThrottledProxy(echo_port, upload=20e6, download=40e6, latency=0.01) as proxy:
        with httpx.Client(base_url=f"http://127.0.0.1:{proxy.port}", timeout=PATIENCE) as client:
            assert [client.post("/", content=body, timeout=PATIENCE).content for body in bodies] == bodies
        threads = [threading.Thread(target=_check, args=(proxy.port, body)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def test_a_connection_to_a_server_that_is_not_there_is_closed() -> None:
    with ThrottledProxy(1, upload=1e6, download=1e6) as proxy, pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{proxy.port}")


def _check(port: int, body: bytes) -> None:
    assert httpx.post(f"http://127.0.0.1:{port}", content=body, timeout=PATIENCE).content == body
