"""How much a server and a client read and hold at most."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import Tensor

from onstep.diloco.client import DiLoCoClient, ServerLostError, connection
from onstep.diloco.protocol.messages import Register
from onstep.diloco.protocol.wire import to_json
from onstep.diloco.server import DiLoCoServer, store
from onstep.diloco.wire import http as wire
from onstep.errors import CheckpointError
from tests.support.waiting import PATIENCE

Serve = Callable[..., DiLoCoServer]


def _head(server: DiLoCoServer, path: str, **headers: object) -> bytes:
    given = {"Host": "x", "Authorization": f"Bearer {server.token}", **headers}
    lines = [f"POST {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in given.items())]
    return "\r\n".join(lines).encode()


def _answer(server: DiLoCoServer, request: bytes) -> bytes:
    """The beginning of what comes for a request that is not sent to its end."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as client:
        client.sendall(request)
        return client.recv(12)


def test_a_message_that_is_too_long_is_refused_before_a_byte_of_it(serve: Serve) -> None:
    server = serve()
    assert _answer(server, _head(server, "/await", Content_Length=1 << 20) + b"\r\n\r\n") == b"HTTP/1.1 413"


def test_a_list_of_parameters_that_is_too_long_is_refused_before_a_byte_of_it(serve: Serve) -> None:
    server = serve()
    message = json.dumps(to_json(Register("a", "s", "another model")))
    head = _head(server, "/register", Content_Length=1 << 30, **{wire.MESSAGE_HEADER: message})
    assert _answer(server, head + b"\r\n\r\n") == b"HTTP/1.1 413"


def test_a_list_of_too_many_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MOST_PARAMETERS", 2)
    three = [[str(number), [1], "F32"] for number in range(3)]
    assert len(wire.specs_from_bytes(json.dumps(three[:2]).encode())) == 2
    with pytest.raises(wire.MalformedBodyError, match="a list of at most 2 items"):
        wire.specs_from_bytes(json.dumps(three).encode())


def test_a_state_that_is_too_large_is_not_read(
    parameters: dict[str, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DiLoCoServer(parameters, output_dir=tmp_path, port=0).stop()
    monkeypatch.setattr(store, "_MOST_BYTES", 100)
    with pytest.raises(CheckpointError, match=r"server\.json"):
        DiLoCoServer(parameters, output_dir=tmp_path, port=0)


def test_a_client_reads_no_page_as_an_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST_JSON_BYTES", 100)
    with (
        DiLoCoClient(serve().address, max_retries=0) as client,
        pytest.raises(ServerLostError, match="where a DiLoCo server sends JSON"),
    ):
        client.get_status()


@pytest.fixture
def endless() -> Iterator[int]:
    """The port of something that says that it sends two terabytes."""

    class Endless(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(1 << 41))
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Endless) as page:
        thread = threading.Thread(target=page.serve_forever, args=(0.05,))
        thread.start()
        yield page.server_port
        page.shutdown()
        thread.join()


def test_a_client_reserves_no_memory_for_a_size_that_no_model_has(endless: int) -> None:
    with (
        DiLoCoClient(f"127.0.0.1:{endless}", max_retries=0, token="x") as client,
        pytest.raises(ServerLostError, match="answers without a length"),
    ):
        client.get_global_params()
