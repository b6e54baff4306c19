"""How submissions come in on connections, and how many connections there may be."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.body import write_body
from onstep.diloco.protocol.messages import Beat, Settings
from onstep.diloco.protocol.wire import to_json
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.serving import limits
from onstep.diloco.wire.http import MESSAGE_HEADER
from tests.support.diloco.raw_worker import RawWorker
from tests.support.diloco.tls import make_tls_files
from tests.support.waiting import PATIENCE

Serve = Callable[..., DiLoCoServer]
Worker = Callable[..., RawWorker]
ALONE = Settings(num_workers=1, min_workers=1, heartbeat_timeout=0.0)


@pytest.fixture
def alone(serve: Serve, worker: Worker) -> tuple[DiLoCoServer, RawWorker]:
    """A server, and its only worker."""
    server = serve(settings=ALONE)
    one = worker(server, "a")
    one.join()
    return server, one


@pytest.fixture
def connect() -> Iterator[Callable[[DiLoCoServer], socket.socket]]:
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(socket.create_connection((server.host, server.port), timeout=PATIENCE))


Connect = Callable[[DiLoCoServer], socket.socket]


def submission(
    server: DiLoCoServer, one: RawWorker, parameters: dict[str, Tensor], version: str = "1.1", *more: str
) -> tuple[bytes, bytes]:
    """The headers and the body of a submission."""
    body = write_body({name: torch.ones_like(tensor) for name, tensor in parameters.items()})
    head = [
        f"POST /submit_pseudograd HTTP/{version}",
        "Host: x",
        f"Authorization: Bearer {server.token}",
        f"{MESSAGE_HEADER}: {json.dumps(to_json(one.request()))}",
        f"Content-Length: {len(body)}",
        *more,
    ]
    return "\r\n".join([*head, "", ""]).encode(), bytes(body)


def answer_on(connection: socket.socket) -> tuple[int, bytes]:
    """One answer: its status and body."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += _received(connection, 1)
    (length,) = [int(line.split()[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    return int(head.split()[1]), b"".join(_received(connection, 1) for _ in range(length))


def _received(connection: socket.socket, most: int) -> bytes:
    piece = connection.recv(most)
    assert piece, "the server closed the connection"
    return piece


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
def test_a_body_may_come_in_pieces_of_any_size(
    size: int, alone: tuple[DiLoCoServer, RawWorker], connect: Connect, parameters: dict[str, Tensor]
) -> None:
    server, one = alone
    head, body = submission(server, one, parameters)
    with connect(server) as connection:
        sent = head + body
        for start in range(0, len(sent), size):
            connection.sendall(sent[start : start + size])
        assert answer_on(connection)[0] == 200
    assert one.get(1)[0].num_contributors == 1


def test_requests_behind_a_submission_on_its_connection_are_answered(
    alone: tuple[DiLoCoServer, RawWorker], connect: Connect, parameters: dict[str, Tensor]
) -> None:
    server, one = alone
    head, body = submission(server, one, parameters)
    next_one = f"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode()
    with connect(server) as connection:
        connection.sendall(head + body[:100])
        connection.sendall(body[100:] + next_one)
        assert answer_on(connection)[0] == 200
        status, content = answer_on(connection)
        assert status == 200
        assert json.loads(content)["counts"]["accepted"] == 1
        connection.sendall(head + body)
        assert json.loads(answer_on(connection)[1])["is_repeat"]


def test_a_client_that_waits_until_its_body_is_wanted_is_told_so(
    alone: tuple[DiLoCoServer, RawWorker], connect: Connect, parameters: dict[str, Tensor]
) -> None:
    server, one = alone
    head, body = submission(server, one, parameters, "1.1", "Expect: 100-continue")
    with connect(server) as connection:
        connection.sendall(head)
        assert connection.recv(4096).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert answer_on(connection)[0] == 200


def test_a_submission_that_is_of_no_use_is_answered_on_a_connection_that_stays(
    serve: Serve, worker: Worker, connect: Connect
) -> None:
    large = {"weight": torch.zeros(1_000_000)}
    server = serve(large, settings=ALONE)
    one = worker(server, "a", large)
    one.join()
    head, body = submission(server, one, large)
    with connect(server) as connection:
        for is_repeat in (False, True, True, True):
            connection.sendall(head + body)
            assert json.loads(answer_on(connection)[1])["is_repeat"] == is_repeat
        one.get(1)  # which waits for the round
        one.session = "another"
        head, body = submission(server, one, large)
        connection.sendall(head + body)
        assert answer_on(connection)[0] == 404
        head, body = submission(server, one, large, "1.1", "Expect: 100-continue")
        connection.sendall(head)
        assert answer_on(connection)[0] == 404
    assert server.sync_round == 1


@pytest.mark.parametrize(("version", "more"), [("1.0", ()), ("1.1", ("Connection: Close, x",))])
def test_a_connection_is_closed_where_its_client_says_so(
    version: str,
    more: tuple[str, ...],
    alone: tuple[DiLoCoServer, RawWorker],
    connect: Connect,
    parameters: dict[str, Tensor],
) -> None:
    server, one = alone
    head, body = submission(server, one, parameters, version, *more)
    with connect(server) as connection:
        connection.sendall(head + body[:10])
        one.beat()  # by then the server reads the body
        connection.sendall(body[10:])
        assert answer_on(connection)[0] == 200
        assert connection.recv(1) == b""


def test_a_body_in_chunks_is_refused_although_its_length_is_given(
    alone: tuple[DiLoCoServer, RawWorker], connect: Connect, parameters: dict[str, Tensor]
) -> None:
    server, one = alone
    head, body = submission(server, one, parameters, "1.1", "Transfer-Encoding: chunked")
    with connect(server) as connection:
        connection.sendall(head + b"%x\r\n" % len(body) + body[:10])
        assert answer_on(connection)[0] == 400
    assert server.sync_round == 0


def test_strangers_cannot_take_the_connections_of_workers(
    serve: Serve,
    worker: Worker,
    connect: Connect,
    parameters: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 8)
    server = serve(settings=ALONE)
    one = worker(server, "a")
    one.join()
    keeps = connect(server)
    head = f"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n".encode()
    keeps.sendall(head)
    assert answer_on(keeps)[0] == 200
    for _ in range(20):
        stranger = connect(server)
        stranger.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert answer_on(stranger)[0] == 200
        stranger.sendall(b"G")
    late = worker(server, "a")
    late.session = one.session
    assert isinstance(late.beat(), Beat)
    keeps.sendall(head)
    assert answer_on(keeps)[0] == 200


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["http", "https"])
def test_megabytes_arrive_as_they_were_sent(is_encrypted: bool, serve: Serve, tmp_path: Path) -> None:
    files = make_tls_files(tmp_path) if is_encrypted else None
    before = {"weight": torch.arange(3_000_000, dtype=torch.float32)}
    server = serve(before, settings=ALONE, tls=files, outer_optimizer_factory=lambda tensors: SGD(tensors, lr=1.0))
    with DiLoCoClient(server.address, verify=None if files is None else files.certificate) as client:
        client.register("a", parameters=before)
        for _ in range(2):
            got = client.submit_pseudogradients("a", {"weight": torch.full((3_000_000,), 2.0)})
    assert torch.equal(got["weight"], before["weight"] - 4)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["http", "https"])
def test_a_client_that_leaves_during_an_answer_is_no_failure(
    is_encrypted: bool, serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_tls_files(tmp_path) if is_encrypted else None
    server = serve({"weight": torch.zeros(16_000_000)}, settings=ALONE, tls=files)
    with socket.create_connection((server.host, server.port), timeout=PATIENCE) as plain, ExitStack() as stack:
        client = plain
        if files is not None:
            context = ssl.create_default_context(cafile=str(files.certificate))
            client = stack.enter_context(context.wrap_socket(plain, server_hostname=server.host))
        head = f"GET /global_params HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {server.token}\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(100_000)
    verify = None if files is None else files.certificate
    with DiLoCoClient(server.address, verify=verify) as other:
        assert other.get_status()["status"] == "running"
    server.stop()
    assert not caplog.records


def test_handshakes_that_are_not_continued_make_room(
    serve: Serve, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_CONNECTIONS", 8)
    files = make_tls_files(tmp_path)
    server = serve(tls=files)
    for _ in range(20):
        connect(server).sendall(b"\x16")
    with DiLoCoClient(server.address, verify=files.certificate, max_retries=0) as client:
        assert client.get_status()["status"] == "running"
