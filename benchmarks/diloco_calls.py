"""Counts the Python calls that a DiLoCo server makes for one submission of 20 numbers, by module.

Run with `python benchmarks/diloco_calls.py`. The limit is 250 calls of Python functions in all threads of the server,
those of libraries included. The body follows the headers in the same packet, or in another one.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from types import FrameType

import torch

from onstep.diloco.client import DiLoCoClient
from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.protocol.messages import Register, Settings, Submit, fingerprint
from onstep.diloco.protocol.wire import to_json
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.wire.http import MESSAGE_HEADER, PATHS

LIMIT, REPEATS, PAUSE_SECONDS = 250, 9, 0.02


def main() -> int:
    """Print both tables; returns 1 if a limit is exceeded."""
    os.environ["ONSTEP_DILOCO_TOKENS"] = tempfile.mkdtemp()
    calls: Counter[str] = Counter()
    main_thread = threading.get_ident()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and threading.get_ident() != main_thread:
            calls[_module(frame.f_code.co_filename)] += 1

    threading.setprofile(count)
    exceeded = False
    for pause_seconds in (0.0, PAUSE_SECONDS):
        counted = _counted(calls, pause_seconds)
        print(f"body in {'another' if pause_seconds else 'the same'} packet: {counted.total()} calls, <= {LIMIT}")
        print("\n".join(f"  {number:4d}  {module}" for module, number in counted.most_common()))
        exceeded = exceeded or counted.total() > LIMIT
    return int(exceeded)


def _counted(calls: Counter[str], pause_seconds: float) -> Counter[str]:
    """The calls, by module, of the submission that made fewest: uvicorn makes some of its own ten times per second."""
    parameters = {"weight": torch.zeros(20)}
    settings = Settings(num_workers=2, min_workers=2)
    body = write_body({"weight": torch.ones(20)})
    found = []
    for number in range(REPEATS):
        with DiLoCoServer(parameters, settings=settings, port=0) as server:
            with DiLoCoClient(server.address, token=server.token) as client:
                client.send(Register("a", "s", fingerprint(specs_of(parameters))))
            message = json.dumps(to_json(Submit("a", "s", 0, 0, 0, 1, 1)))
            path = PATHS[Submit]
            head = (
                f"POST {path} HTTP/1.1\r\nHost: x\r\nUser-Agent: x\r\nAuthorization: Bearer {server.token}\r\n"
                f"Content-Type: x/x\r\n{MESSAGE_HEADER}: {message}\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            with socket.create_connection((server.host, server.port)) as connection:
                time.sleep(0.1)
                calls.clear()
                for piece in (head, body) if pause_seconds else (head + body,):
                    connection.sendall(piece)
                    time.sleep(PAUSE_SECONDS)
                assert connection.recv(12).endswith(b"200"), number
                found.append(calls.copy())
    return min(found, key=Counter.total)


def _module(path: str) -> str:
    for root in ("/site-packages/", "/src/", f"/python{sys.version_info[0]}.{sys.version_info[1]}/"):
        path = path.rpartition(root)[2]
    parts = path.split("/")
    return "/".join(parts[:3]) if parts[0] == "onstep" else parts[0]


if __name__ == "__main__":
    sys.exit(main())
