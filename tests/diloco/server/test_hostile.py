"""What strangers and broken workers send: refused with a clear status, and the round is as it was."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.formats import encode
from onstep.diloco.protocol.messages import Accepted, Refused, Settings
from onstep.diloco.protocol.wire import to_json
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.wire.http import MESSAGE_HEADER, TENSORS
from tests.support.control_server import received
from tests.support.diloco.raw_worker import RawWorker
from tests.support.waiting import PATIENCE

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
TWO = Settings(num_workers=2, min_workers=2, heartbeat_timeout=0.0)


@pytest.fixture
def server(serve: Serve) -> DiLoCoServer:
    """A server of two workers."""
    return serve(settings=TWO)


@pytest.fixture
def pair(server: DiLoCoServer, worker: Worker, parameters: dict[str, Tensor]) -> list[RawWorker]:
    """Two workers, the first of which has submitted."""
    workers = [worker(server, name) for name in "ab"]
    for one in workers:
        one.join()
    workers[0].submit({name: torch.ones_like(one) for name, one in parameters.items()})
    return workers


def _post(server: DiLoCoServer, path: str, content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    given = {"Authorization": f"Bearer {server.token}", **(headers or {})}
    return httpx.post(
        f"http://{server.address}{path}", content=content, headers=given, trust_env=False, timeout=PATIENCE
    )


def _submit(server: DiLoCoServer, one: RawWorker, body: Any, **changed: Any) -> httpx.Response:
    message = {**to_json(one.request()), **changed}
    return _post(server, "/submit_pseudograd", body, {MESSAGE_HEADER: json.dumps(message), "Content-Type": TENSORS})


def _round_is_intact(server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]) -> None:
    """The second worker completes the round, with the average of what both meant."""
    assert server.sync_round == 0
    reply = pair[1].submit({name: 3 * torch.ones_like(one) for name, one in parameters.items()})
    assert reply == Accepted(1)
    got = pair[1].get(1)[1]
    for name, one in parameters.items():
        assert torch.allclose(got[name], one - 0.7 * 1.6 * 2, rtol=0, atol=1e-5)


def _with_header(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


BODIES: dict[str, bytes] = {
    "empty": b"",
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "a header longer than the body": struct.pack("<Q", 2**62) + b"{}",
    "a header that is no JSON": _with_header(b"{" * 100),
    "a header that is a list": _with_header([]),
    "nested too deep": _with_header(b"[" * 50_000 + b"]" * 50_000)[:4000],
    "an enormous shape": _with_header({"head.bias": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}),
    "a negative shape": _with_header({"head.bias": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, b"1234"),
    "offsets beyond the end": _with_header({"head.bias": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}),
    "an unknown dtype": _with_header(
        {"head.bias": {"dtype": "OBJECT", "shape": [7], "data_offsets": [0, 28]}}, b"1" * 28
    ),
    "no tensors": _with_header({}),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_body_is_refused(
    name: str, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    answer = _submit(server, pair[1], BODIES[name])
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]
    _round_is_intact(server, pair, parameters)


def _spoiled(parameters: dict[str, Tensor], change: Callable[[dict[str, Tensor]], object]) -> bytes:
    tensors = {name: torch.ones_like(one) for name, one in parameters.items()}
    change(tensors)
    return write_body(tensors)


TENSORS_GIVEN: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "NaN": (lambda some: some["head.bias"].fill_(float("nan")), "head.bias"),
    "one infinity": (lambda some: some["blocks.1.weight"][3, 2].fill_(float("-inf")), "blocks.1.weight"),
    "a scalar that is NaN": (lambda some: some["head.scale"].fill_(float("nan")), "head.scale"),
    "a wrong shape": (lambda some: some.update({"blocks.0.weight": torch.ones(5, 6)}), "blocks.0.weight"),
    "a wrong dtype": (lambda some: some.update({"head.bias": torch.ones(7).half()}), "head.bias"),
    "a missing name": (lambda some: some.pop("head.bias"), "head.bias"),
    "an unknown name": (lambda some: some.update({"extra": torch.empty(0)}), "extra"),
}


@pytest.mark.parametrize("name", TENSORS_GIVEN)
def test_tensors_that_are_not_the_models_are_refused_by_name(
    name: str, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    change, culprit = TENSORS_GIVEN[name]
    answer = _submit(server, pair[1], _spoiled(parameters, change))
    assert answer.status_code == 422, answer.text
    assert culprit in answer.json()["error"]
    _round_is_intact(server, pair, parameters)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_scales_that_are_not_finite_are_refused(
    codec: str, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    encoded = encode({name: torch.ones_like(one) for name, one in parameters.items()}, codec)
    encoded["head.bias::scale"].fill_(float("inf"))
    answer = _submit(server, pair[1], write_body(encoded), codec=codec)
    assert (answer.status_code, "head.bias" in answer.text) == (422, True)
    _round_is_intact(server, pair, parameters)


MESSAGES: dict[str, tuple[dict[str, Any], int]] = {
    "no tokens": ({"tokens": 0}, 400),
    "negative tokens": ({"tokens": -5}, 400),
    "tokens as text": ({"tokens": "many"}, 400),
    "too many tokens": ({"tokens": 10**30}, 400),
    "infinite tokens": ({"tokens": float("inf")}, 400),
    "an unknown field": ({"is_admin": True}, 400),
    "another class": ({"type": "Settings"}, 400),
    "a fragment that does not exist": ({"fragment": 7}, 400),
    "a version from the future": ({"base_version": 5}, 409),
    "an unknown codec": ({"codec": "zip"}, 422),
    "another worker": ({"worker_id": "nobody"}, 404),
    "a session that was not registered": ({"session": "stolen"}, 404),
    "a long name": ({"worker_id": "x" * 5000}, 400),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_out_of_range_is_refused(
    name: str, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    changed, status = MESSAGES[name]
    body = write_body({name: torch.ones_like(one) for name, one in parameters.items()})
    answer = _submit(server, pair[1], body, **changed)
    assert answer.status_code == status, answer.text
    _round_is_intact(server, pair, parameters)


@pytest.mark.parametrize("header", ["", "{", "[]", "null", "\xff\xfe", '{"type": "Submit"}', "1" * 5000, "[" * 5000])
def test_a_header_that_is_no_message_is_refused(
    header: str, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    answer = (
        _post(server, "/submit_pseudograd", b"x", {MESSAGE_HEADER: header.encode("latin-1").decode("latin-1")})
        if (header.isascii())
        else _raw(server, f"POST /submit_pseudograd HTTP/1.1\r\n{MESSAGE_HEADER}: ".encode() + header.encode("latin-1"))
    )
    status = answer if isinstance(answer, int) else answer.status_code
    assert status == 400
    _round_is_intact(server, pair, parameters)


def _raw(server: DiLoCoServer, beginning: bytes, ending: bytes = b"") -> int:
    """Send bytes as they are; the status of the answer."""
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        token = f"\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\nContent-Length: {len(ending)}\r\n\r\n"
        connection.sendall(beginning + token.encode() + ending)
        return int(connection.recv(4096).split()[1])


@pytest.mark.parametrize(
    "token", [None, "", "Bearer", "Bearer wrong", "Basic {token}", "Bearer {token}x", "bearer  {token}"]
)
@pytest.mark.parametrize("path", ["/register", "/submit_pseudograd", "/await", "/control/shutdown", "/status", "/none"])
def test_without_the_token_nothing_is_answered_or_read(token: str | None, path: str, server: DiLoCoServer) -> None:
    headers = {} if token is None else {"Authorization": token.format(token=server.token)}
    answer = httpx.post(
        f"http://{server.address}{path}", content=b"{}", headers=headers, trust_env=False, timeout=PATIENCE
    )
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert server.token not in answer.text


def test_a_second_token_is_not_tried(server: DiLoCoServer) -> None:
    assert _raw(server, b"GET /status HTTP/1.1") == 200
    assert _raw(server, b"GET /status HTTP/1.1\r\nAuthorization: Bearer wrong") == 401


def test_a_wrong_token_is_refused_before_a_byte_of_the_body(server: DiLoCoServer) -> None:
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        connection.sendall(b"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000000\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("length", ["999999999999999", "18446744073709551616", "9" * 40])
def test_a_huge_declared_size_is_refused_before_a_byte_of_it(
    length: str, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    message = json.dumps(to_json(pair[1].request()))
    head = f"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        connection.sendall(f"{head}{MESSAGE_HEADER}: {message}\r\nContent-Length: {length}\r\n\r\n".encode())
        status = int(connection.recv(4096).split()[1])
    assert status in (400, 413)
    _round_is_intact(server, pair, parameters)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/control/status", 404),
        ("GET", "/register", 405),
        ("POST", "/status", 405),
        ("GET", "/control/shutdown", 405),
    ],
)
def test_a_request_that_no_handler_has_is_refused(method: str, path: str, status: int, server: DiLoCoServer) -> None:
    headers = {"Authorization": f"Bearer {server.token}"}
    answer = httpx.request(method, f"http://{server.address}{path}", headers=headers, timeout=PATIENCE)
    assert answer.status_code == status
    assert path in answer.json()["error"]


def test_a_body_without_a_length_is_refused(server: DiLoCoServer, pair: list[RawWorker]) -> None:
    assert _submit(server, pair[1], iter([b"abc"])).status_code == 411


def test_a_body_that_ends_early_counts_for_nothing(
    server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    body = write_body({name: torch.ones_like(one) for name, one in parameters.items()})
    message = json.dumps(to_json(pair[1].request()))
    head = f"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        connection.sendall(
            f"{head}{MESSAGE_HEADER}: {message}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body[:-5]
        )
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    pair[1].beat()  # by then the server has noticed
    _round_is_intact(server, pair, parameters)


def test_a_submission_that_starts_again_ends_the_one_that_hangs(
    server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    message = json.dumps(to_json(pair[1].request()))
    head = f"POST /submit_pseudograd HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n"
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        head += f"{MESSAGE_HEADER}: {message}\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")  # it reads the body now
        connection.sendall(b"abc")
        _round_is_intact(server, pair, parameters)
        assert received(connection) == b""


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 100, b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"POST / HTTP/9.9\r\n\r\n"]
)
def test_garbage_on_a_connection_harms_nobody(
    garbage: bytes, server: DiLoCoServer, pair: list[RawWorker], parameters: dict[str, Tensor]
) -> None:
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as connection:
        connection.sendall(garbage)
        with suppress(OSError):  # what does not begin like HTTP is cut off without an answer
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass
    _round_is_intact(server, pair, parameters)


def test_a_page_in_a_browser_is_refused_even_where_no_token_is_needed(serve: Serve) -> None:
    server = serve(token="")
    answer = httpx.post(
        f"http://{server.address}/control/shutdown",
        json={},
        headers={"Origin": "http://evil.example"},
        timeout=PATIENCE,
    )
    assert answer.status_code == 403
    assert httpx.get(f"http://{server.address}/status", timeout=PATIENCE).status_code == 200


def test_a_submission_of_an_older_session_is_refused(
    server: DiLoCoServer, pair: list[RawWorker], worker: Worker, parameters: dict[str, Tensor]
) -> None:
    again = worker(server, "b")
    again.join()
    reply = pair[1].submit({name: torch.ones_like(one) for name, one in parameters.items()})
    assert isinstance(reply, Refused)
    assert reply.status == 409
    _round_is_intact(server, [pair[0], again], parameters)


@pytest.mark.parametrize("body", [b"", b"[", b"{}", b'[["a", [1]]]', b'[["a", [-1], "F32"]]', b'[["a", [1], 5]]'])
def test_a_registration_with_a_malformed_list_is_refused(body: bytes, server: DiLoCoServer) -> None:
    message = {"type": "Register", "worker_id": "c", "session": "s", "fingerprint": "other"}
    answer = _post(server, "/register", body, {MESSAGE_HEADER: json.dumps(message), "Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert httpx.get(f"http://{server.address}/health", timeout=PATIENCE).json() == {"status": "ok"}
