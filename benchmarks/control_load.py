"""Sends a control server as much as strangers can, for `control.py`; in a process of its own that imports little."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator


def main() -> None:
    """Do what the command line says, to which port and on which core, until killed."""
    attack, port = sys.argv[1], int(sys.argv[2])
    os.sched_setaffinity(0, {int(sys.argv[3])})
    os.nice(19)  # what else runs there is not pushed to the core of the training
    attacks: dict[str, Callable[[int], Iterator[None]]] = {
        "none": _nothing,
        "idle connections": _idle_connections,
        "slow clients": _slow_clients,
        "garbage": _garbage,
        "wrong tokens": _wrong_tokens,
    }
    chosen = list(attacks.values())[1:] if attack == "all of them" else [attacks[attack]]
    running = [one(port) for one in chosen]
    for number in itertools.count():
        for one in running:
            next(one)
        if number == 20:
            print("at work", flush=True)


def _nothing(port: int) -> Iterator[None]:
    """Use the core, and leave the server alone."""
    while True:
        yield


def _connected(port: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", port))
    return one


def _idle_connections(port: int) -> Iterator[None]:
    """1,000 connections that send nothing; each that is closed is opened again."""
    connections = [_connected(port) for _ in range(1000)]
    while True:
        for index, one in enumerate(connections):
            try:
                is_closed = one.recv(1) == b""
            except BlockingIOError:
                is_closed = False
            except OSError:
                is_closed = True
            if is_closed:
                one.close()
                connections[index] = _connected(port)
            if index % 50 == 0:
                yield


def _slow_clients(port: int) -> Iterator[None]:
    """50 clients that send a request at a byte a second."""
    request = b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1000
    clients = [(_connected(port), iter(request)) for _ in range(50)]
    due = time.monotonic()
    while True:
        yield
        if time.monotonic() < due:
            time.sleep(0.001)
            continue
        due += 1.0
        for index, (one, rest) in enumerate(clients):
            try:
                one.send(bytes([next(rest)]))
            except BlockingIOError:
                continue
            except (OSError, StopIteration):
                one.close()
                clients[index] = (_connected(port), iter(request))


def _garbage(port: int) -> Iterator[None]:
    """Random bytes, half of them after the beginning of a request, one connection each."""
    rng = random.Random(1)
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.05) as one:
            begin = b"POST /login HTTP/1.1\r\nHost: localhost\r\n" if rng.random() < 0.5 else b""
            one.sendall(begin + rng.randbytes(rng.randrange(1, 5000)))
        yield


def _wrong_tokens(port: int) -> Iterator[None]:
    """8 connections on which guesses follow each other as fast as they are answered."""
    request = b"GET /jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n"
    connections = [_connected(port) for _ in range(8)]
    while True:
        for index, one in enumerate(connections):
            try:
                one.send(request)
                if one.recv(65536) == b"":
                    raise ConnectionResetError
            except BlockingIOError:
                continue
            except OSError:
                one.close()
                connections[index] = _connected(port)
        yield


if __name__ == "__main__":
    main()
