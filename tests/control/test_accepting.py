"""How many connections a server has, however many come at once."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from onstep.control.serving.accepting import Acceptor
from onstep.control.serving.connections import new_config
from onstep.control.serving.limits import ConnectionLimits
from onstep.control.serving.listening import listen

Connect = Callable[..., list[socket.socket]]
"""Takes how many connections to make, and whether their requests have a token."""
MOST = 16


def served(
    work: Callable[[Connect, Acceptor], Awaitable[None]], closed_for_room: int = 1, at_once: float = 100.0
) -> None:
    """Work with a server that has at most `MOST` connections; connecting keeps its loop from running."""

    async def hello(request: Request) -> PlainTextResponse:
        request.scope["state"]["connection"].is_admitted = "authorization" in request.headers
        return PlainTextResponse("hello")

    async def main() -> None:
        listener = listen("127.0.0.1", 0, range(0), 64)
        limits = ConnectionLimits(MOST, 1000.0, 100.0, 10 * at_once, at_once, closed_for_room)
        errors: list[Exception] = []
        acceptor = Acceptor(listener, new_config(Starlette(routes=[Route("/", hello)])), errors.append, limits)
        acceptor.open()
        with ExitStack() as stack:
            stack.callback(listener.close)
            stack.callback(acceptor.close)

            def connect(number: int, has_token: bool = False) -> list[socket.socket]:
                token = b"Authorization: Bearer x\r\n" * has_token
                found = [stack.enter_context(socket.create_connection(listener.getsockname())) for _ in range(number)]
                for one in found:
                    one.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n" + token + b"\r\n")
                    one.setblocking(False)
                return found

            await work(connect, acceptor)
        assert not errors

    asyncio.run(asyncio.wait_for(main(), 30))


def is_open(one: socket.socket) -> bool:
    """Whether the server has not closed it; takes what has been sent."""
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return True
    except ConnectionError:
        pass
    return False


def test_a_burst_does_not_exceed_the_limit() -> None:
    async def work(connect: Connect, acceptor: Acceptor) -> None:
        first = connect(MOST)
        await asyncio.sleep(0.2)
        assert all(map(is_open, first))
        second = connect(MOST)
        await asyncio.sleep(0.2)
        assert not any(map(is_open, first))
        assert all(map(is_open, second))

    served(work)


def test_as_many_strangers_as_wished_are_closed_together() -> None:
    async def work(connect: Connect, acceptor: Acceptor) -> None:
        first = connect(MOST)
        await asyncio.sleep(0.2)
        connect(1)
        await asyncio.sleep(0.2)
        assert [is_open(one) for one in first].count(True) == MOST - 4
        connect(3)
        await asyncio.sleep(0.2)
        assert [is_open(one) for one in first].count(True) == MOST - 4

    served(work, closed_for_room=4)


def test_a_burst_of_strangers_leaves_idle_connections_of_others_alone() -> None:
    async def work(connect: Connect, acceptor: Acceptor) -> None:
        workers, strangers = connect(6, has_token=True), connect(6)
        await asyncio.sleep(0.2)
        burst = connect(2 * MOST)
        most_open = 0
        for _ in range(500):
            await asyncio.sleep(0)
            most_open = max(most_open, sum(one.fileno() >= 0 for one in acceptor.sockets))
        await asyncio.sleep(0.5)
        assert all(map(is_open, workers))
        assert not any(map(is_open, strangers))
        assert [is_open(one) for one in burst].count(True) == MOST - 6
        assert most_open <= MOST + 1  # for which room is made

    served(work)


def test_closing_closes_those_that_wait_for_their_turn_too() -> None:
    async def work(connect: Connect, acceptor: Acceptor) -> None:
        clients = connect(4)
        await asyncio.sleep(0.05)
        acceptor.close()
        await asyncio.sleep(0.3)
        assert not any(map(is_open, clients))
        assert all(one.fileno() < 0 for one in acceptor.sockets)

    served(work, at_once=1.0)
