"""How many connections a server has, for how long, and what it keeps of those that come too fast."""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from onstep.http.binding import listen
from onstep.http.listener import ClientLimits, Listener
from onstep.http.server import HttpServer
from onstep.http.watch import client_of
from tests.support.waiting import PATIENCE, until

MOST = 16
HELLO = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
ADMITTED = b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: x\r\n\r\n"
BODY = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nabc"


class Server:
    """A server with few connections, and clients that speak raw bytes."""

    def __init__(self, stack: ExitStack, limits: ClientLimits) -> None:
        self.errors: list[BaseException | None] = []
        self._stack = stack
        self.listener = Listener(listen("127.0.0.1", 0, range(0), limits.backlog), limits)
        routes = [
            Route("/", self._hello),
            Route("/body", self._body, methods=["POST"]),
            Route("/endless", self._endless),
        ]
        server = HttpServer(Starlette(routes=routes), self.listener, name="test", on_end=self.errors.append)
        self._address = self.listener.getsockname()
        server.start()
        self.server = server
        stack.callback(server.stop, 10.0)

    def connect(self, number: int = 1, request: bytes = b"", *, waits: bool = True) -> list[socket.socket]:
        """Connections that sent a request: once all are answered or cut off if it is whole, else after a while."""
        found = [
            self._stack.enter_context(socket.create_connection(self._address, timeout=PATIENCE)) for _ in range(number)
        ]
        for one in found:
            one.sendall(request)
        if waits and request.endswith(b"\r\n\r\n"):
            for one in found:
                assert select.select([one], [], [], PATIENCE)[0]
        else:
            time.sleep(0.3)
        return found

    async def _hello(self, request: Request) -> Response:
        client_of(request.scope).is_admitted = "authorization" in request.headers
        return PlainTextResponse("hello")

    async def _body(self, request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def _endless(self, request: Request) -> Response:
        return StreamingResponse(iter(lambda: b"x" * 65_536, b""))


@contextmanager
def serving(**limits: float) -> Iterator[Server]:
    """A server with at most `MOST` connections."""
    with ExitStack() as stack:
        chosen = {"connections": MOST, "accepts_per_second": 1000.0, "backlog": 64, **limits}
        yield Server(stack, ClientLimits(**chosen))  # type: ignore[arg-type]


def is_open(one: socket.socket) -> bool:
    """Whether the server has not closed it; takes what has been sent."""
    one.setblocking(False)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def ends(one: socket.socket) -> bool:
    """Wait until the server closes a connection."""
    one.settimeout(PATIENCE)
    with suppress(ConnectionError):
        while one.recv(65_536):
            pass
    return True


@pytest.mark.parametrize("request_bytes", [b"", HELLO], ids=["silent", "speaking"])
def test_a_burst_does_not_exceed_the_limit_and_the_newest_are_served(request_bytes: bytes) -> None:
    with serving() as server:
        first = server.connect(MOST, request_bytes)
        assert all(map(is_open, first))
        second = server.connect(MOST, request_bytes)
        assert all(ends(one) for one in first)
        assert all(map(is_open, second))


def test_a_burst_of_strangers_leaves_the_idle_connections_of_others_alone() -> None:
    with serving() as server:
        workers, strangers = server.connect(6, ADMITTED), server.connect(6, HELLO)
        burst = server.connect(2 * MOST, HELLO)
        assert all(map(is_open, workers))
        assert not any(map(is_open, strangers))
        assert [is_open(one) for one in burst].count(True) == MOST - 6


def test_among_the_admitted_the_first_idle_one_makes_room() -> None:
    with serving() as server:
        workers = server.connect(MOST, ADMITTED)
        [late] = server.connect(1, ADMITTED)
        assert [is_open(one) for one in workers] == [False] + [True] * (MOST - 1)
        assert is_open(late)


def test_connections_that_come_too_fast_wait() -> None:
    with serving(accepts_per_second=2.0, accepts_at_once=4.0) as server:
        began = time.monotonic()
        clients = server.connect(6, HELLO, waits=False)
        assert all(one.recv(8) for one in clients[:4])
        assert clients[5].recv(8) == b"HTTP/1.1"
        assert time.monotonic() - began > 0.99, "two more than at once, at two a second"


@pytest.mark.parametrize("sent", [b"", HELLO[:9], HELLO, HELLO + HELLO[:9], BODY], ids=range(5))
def test_a_client_that_sends_nothing_more_is_cut_off(sent: bytes) -> None:
    with serving(request_seconds=1.0, body_seconds=1.0) as server:
        [client] = server.connect(1, sent)
        assert ends(client)


def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    with serving(answer_seconds=1.0) as server:
        [client] = server.connect(1, b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        address = client.getsockname()
        until(lambda: select.select([client], [], [], 0)[0])
        until(lambda: server.listener.client(address).descriptor < 0)
        assert ends(client)


def test_a_client_that_sends_its_body_byte_by_byte_is_cut_off() -> None:
    with serving(body_seconds=1.0) as server:
        [client] = server.connect(1, BODY.replace(b"Length: 100", b"Length: 1000"))

        def is_cut() -> bool:
            with suppress(ConnectionError):
                client.sendall(b"x")
            return not is_open(client)

        until(is_cut)


def _with_headers_of(size: int) -> bytes:
    return HELLO[:-2] + b"X: " + b"x" * (size - len(HELLO) - 5) + b"\r\n\r\n"


@pytest.mark.parametrize("at_once", [700, 1 << 20])
def test_a_request_is_read_no_further_than_its_headers_may_be_long(at_once: int) -> None:
    with serving(header_bytes=20_000) as server:
        for size, is_answered in ((20_000, True), (20_001, False)):
            [client] = server.connect()
            request = _with_headers_of(size)
            for start in range(0, size, at_once):
                client.sendall(request[start : start + at_once])
            client.settimeout(PATIENCE)
            try:
                answer = client.recv(8)
            except ConnectionError:
                answer = b""
            assert answer == (b"HTTP/1.1" if is_answered else b"")


@pytest.mark.parametrize("first", [HELLO, BODY + b"x" * 97])
def test_headers_behind_a_request_have_the_same_limit(first: bytes) -> None:
    with serving() as server:
        [client] = server.connect(1, first + HELLO[:-2] + b"X: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            client.sendall(b"x" * 30_000_000)


def test_a_body_that_nobody_reads_is_not_read_to_its_end() -> None:
    with serving() as server:
        [client] = server.connect(1, b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n")
        with pytest.raises(OSError, match=r"reset|pipe"):
            client.sendall(b"x" * 1_000_000_000)


def test_a_listener_that_breaks_ends_the_server_with_its_error() -> None:
    with serving() as server:
        server.connect()
        server.listener.shutdown(socket.SHUT_RDWR)  # accept() fails from now on
        assert server.server.wait(PATIENCE)
        assert [type(one) for one in server.errors] == [OSError]


def test_stopping_ends_all_connections_and_uvicorn_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "uvicorn.error"), serving() as server:
        clients = [*server.connect(2), *server.connect(2, HELLO), *server.connect(2, BODY)]
        server.server.stop(10.0)
        assert not any(map(is_open, clients))
        assert server.errors == [None]
    assert not [one for one in caplog.records if one.name.startswith("uvicorn")]
