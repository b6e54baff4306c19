"""A DiLoCo server's round compared with the bare copy of its bytes, its memory, and the codecs compared with memcpy.

Run with `python benchmarks/diloco.py` on a quiet machine with two free cores and 6 GB of memory. Rows and limits:

- "wire": seconds in which a process that does nothing else receives the submissions of all workers through loopback,
  and sends them as many bytes back; the workers are threads of another process. The best of several.
- "moved": the same, with all else that a round has to move: between the two, this process copies the server's state by
  memcpy. Masters, momentum and the parameters that workers have are read and written in every round, whatever the
  codec: 12 bytes for each parameter, where submissions and updates in int8 have 2 for each worker.
- "round": seconds from the first byte of a submission to the last byte of the new parameters at the last worker:
  receive, check, average, outer step, hash, send. The three are interleaved; the best round, and its ratio to the best
  "moved" (limit 3). The ratio to "wire" was the one with the limit before: with int8, it compares an outer step on 12
  bytes for each parameter with the transport of 1, and no server that keeps its state in float32 could reach it.
- "processor": seconds of processor time that the server's process spends on a round, beside that of the process of
  "moved"; on a machine that does much else, this ratio says more than that of the times.
- "saved round": the same with the round made durable on disk before it is sent; depends on the disk, so without limit.
- "memory": the server's peak beyond what Python and its imports need, in bytes per parameter, beside theory: masters
  and momentum (4 each), and the update of a codec that is not exact. Submissions and versions are mapped from files
  and are in memory in pieces. Limit 16 with fp32 and 12 with other codecs, for 100 million parameters: decoding needs
  some copies of the largest parameter, whatever the size of the model.
- "codec": gigabytes of float32 per second that each codec encodes and decodes, beside memcpy.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import resource
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onstep.diloco.codec.body import write_body
from onstep.diloco.codec.formats import decode, encode
from onstep.diloco.codec.specs import specs_of
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.protocol.messages import Await, Heartbeat, Register, Request, Settings, Submit, fingerprint
from onstep.diloco.protocol.wire import to_json
from onstep.diloco.server import DiLoCoServer
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment
from onstep.diloco.sizes import CODECS
from onstep.diloco.wire.http import MESSAGE_HEADER, PATHS

ROUND_LIMIT, EXACT_LIMIT, CODEC_LIMIT = 3.0, 16.0, 12.0
PIECE = 1 << 20


def main() -> int:
    """Print one table; returns 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=100e6)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--codec", default="fp32", choices=CODECS, help="of submissions and updates")
    parser.add_argument(
        "--save", action="store_true", help="also measure rounds that are saved, below the temporary directory"
    )
    parser.add_argument("--serve", choices=["wire", "moved", "round", "saved"], help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each codec and direction")
    arguments = parser.parse_args()
    if arguments.serve is not None:
        _serve(arguments)
        return 0
    num_exceeded = 0
    for name, shown, limit, holds in (*_rounds(arguments), *_codecs(arguments.seconds)):
        print(f"{name:<18}  {shown:<84}  {limit:<12}  {'ok' if holds else 'TOO MUCH'}", flush=True)
        num_exceeded += not holds
    return int(num_exceeded > 0)


Row = tuple[str, str, str, bool]


def _parameters(number: float) -> dict[str, Tensor]:
    """Matrices of 1024 x 4096 with their norms, as in a transformer, about as many as asked."""
    blocks = max(1, round(number / (1024 * 4097)))
    shapes = [
        (f"blocks.{i}.{name}", shape)
        for i in range(blocks)
        for name, shape in (("weight", (1024, 4096)), ("norm", (1024,)))
    ]
    return {name: torch.full(shape, 0.5) for name, shape in shapes}


# --- the processes that serve


def _serve(arguments: argparse.Namespace) -> None:
    if arguments.serve in ("wire", "moved"):
        _serve_copies(arguments.workers, int(arguments.parameters) if arguments.serve == "moved" else 0)
        return
    _touch_the_code()
    before = _resident_bytes()
    settings = Settings(
        num_workers=arguments.workers, min_workers=arguments.workers, codec=arguments.codec, heartbeat_timeout=0.0
    )
    directory = tempfile.mkdtemp() if arguments.serve == "saved" else None
    parameters = _parameters(arguments.parameters)
    options: dict[str, Any] = {"settings": settings, "save_every_n_rounds": 0, "output_dir": directory, "port": 0}
    server = DiLoCoServer(parameters, **options)
    parameters.clear()
    server.start()
    started = time.process_time()
    print(server.port, flush=True)
    sys.stdin.read()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"before": before, "peak": peak, "processor": time.process_time() - started}), flush=True)
    os._exit(0)


def _touch_the_code() -> None:
    """Execute a round of a small server, so that what the libraries need for one is in memory."""
    small = {"weight": torch.zeros(1024, 1024)}
    part = Fragment(specs_of(small), small, nesterov_sgd, "fp32")
    part.step([Contribution({"weight": torch.ones(1024, 1024)}, "fp32", 1.0) for _ in range(4)])


def _serve_copies(workers: int, num_values: int) -> None:
    """Receive so many bytes on each connection as its first eight say; when all are there, send them back.

    Before that, read and write three float32 for each of so many values.
    """
    state, copied = torch.full((num_values,), 0.5), torch.empty(num_values)

    def copy_state() -> None:
        for _ in range(3):
            copied.copy_(state)

    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_quit_with_parent, daemon=True).start()
    everyone = threading.Barrier(workers, copy_state)

    def serve(connection: socket.socket) -> None:
        memory = memoryview(bytearray(8))
        while _fill(connection.recv_into, memory):
            received = np.empty(int.from_bytes(memory, "little"), np.uint8).data
            _fill(connection.recv_into, received)
            everyone.wait()
            connection.sendall(received)

    while True:
        threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()


def _quit_with_parent() -> None:
    started = time.process_time()
    sys.stdin.read()
    print(json.dumps({"processor": time.process_time() - started}), flush=True)
    os._exit(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _fill(read_into: Callable[[memoryview], int], memory: memoryview) -> bool:
    """Read until the memory is full; False if the other side has closed."""
    position = 0
    while position < memory.nbytes:
        count = read_into(memory[position : position + PIECE])
        if not count:
            return False
        position += count
    return True


class _Process:
    """A server in a process of its own."""

    def __init__(self, kind: str, arguments: argparse.Namespace) -> None:
        words = [f"--{name}={getattr(arguments, name)}" for name in ("parameters", "workers", "codec")]
        command = [sys.executable, __file__, f"--serve={kind}", *words]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    def end(self) -> dict[str, float]:
        """End it; what it says of its memory and processor time."""
        answer, _ = self._process.communicate()
        said: dict[str, float] = json.loads(answer)
        return said


@contextmanager
def _process(kind: str, arguments: argparse.Namespace) -> Iterator[_Process]:
    process = _Process(kind, arguments)
    try:
        yield process
    finally:
        process._process.kill()


# --- the workers: HTTP by hand, so that the server is measured, not its client


class _Copier:
    def __init__(self, port: int, body: memoryview) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._body = body
        self._received = memoryview(bytearray(body.nbytes))

    def exchange(self) -> None:
        """Send the bytes, and receive as many."""
        self._connection.sendall(self._body.nbytes.to_bytes(8, "little"))
        self._connection.sendall(self._body)
        _fill(self._connection.recv_into, self._received)


class _Worker:
    def __init__(self, port: int, name: str, parameters: dict[str, Tensor], body: memoryview, codec: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, blocksize=PIECE)
        self._name, self._session, self._codec = name, secrets.token_hex(4), codec
        self._body = body
        self._version = 0
        self._received = memoryview(bytearray(sum(one.nbytes for one in parameters.values()) + (1 << 20)))
        token = Path(os.environ["ONSTEP_DILOCO_TOKENS"], f"{port}.token").read_text().strip()
        self._headers = {"Authorization": f"Bearer {token}"}
        self._post(Register(name, self._session, fingerprint(specs_of(parameters))))

    def exchange(self) -> None:
        """Submit, and wait for the new parameters."""
        self._connection.close()  # the server has closed it if the others needed long
        submit = Submit(self._name, self._session, self._version, 0, self._version, 1, 1, self._codec)
        self._post(submit, self._body)
        kind = ""
        while kind != "Ready":
            question = Await(self._name, self._session, 0, self._version + 1, self._version, wait=20.0)
            kind = self._post(question)["type"]
        self._version += 1

    def beat(self) -> None:
        """Give a sign of life."""
        self._post(Heartbeat(self._name, self._session))

    def _post(self, request: Request, body: bytes | memoryview = b"") -> dict[str, Any]:
        header = {MESSAGE_HEADER: json.dumps(to_json(request)), "Content-Length": str(memoryview(body).nbytes)}
        self._connection.request("POST", PATHS[type(request)], headers={**self._headers, **header})
        assert self._connection.sock is not None
        self._connection.sock.sendall(body)
        answer = self._connection.getresponse()
        assert answer.status == 200, answer.read()
        memory = self._received[: int(answer.headers["Content-Length"])]
        _fill(answer.readinto, memory)
        message = answer.headers.get(MESSAGE_HEADER)
        found: dict[str, Any] = json.loads(bytes(memory) if message is None else message)
        return found


def _seconds(exchanges: list[Callable[[], None]]) -> float:
    """Time until all exchanges, which begin together, are over."""
    with ThreadPoolExecutor(len(exchanges)) as threads:
        start = time.perf_counter()
        for done in [threads.submit(exchange) for exchange in exchanges]:
            done.result()
        return time.perf_counter() - start


def _rounds(arguments: argparse.Namespace) -> Iterator[Row]:
    os.environ["ONSTEP_DILOCO_TOKENS"] = tempfile.mkdtemp()
    parameters = _parameters(arguments.parameters)
    count = sum(one.numel() for one in parameters.values())
    body = memoryview(write_body(encode({name: one * 0.01 for name, one in parameters.items()}, arguments.codec)))
    kinds = ["wire", "moved", "round", *(["saved"] if arguments.save else [])]
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with ExitStack() as stack:
        processes = {kind: stack.enter_context(_process(kind, arguments)) for kind in kinds}
        crews: dict[str, list[Callable[[], None]]] = {}
        for kind, process in processes.items():
            crew: list[Any] = [
                _Copier(process.port, body)
                if kind in ("wire", "moved")
                else _Worker(process.port, f"worker-{number}", parameters, body, arguments.codec)
                for number in range(arguments.workers)
            ]
            crews[kind] = [one.exchange for one in crew]
        for number in range(arguments.repeats + 1):
            for kind, crew in crews.items():
                seconds = _seconds(crew)
                if number:  # the first touches memory for the first time
                    times[kind].append(seconds)
        said = processes["round"].end()
        moved = processes["moved"].end()
    yield from _shown(times, said, count, body.nbytes, arguments)
    each = [one["processor"] / (arguments.repeats + 1) for one in (said, moved)]
    yield (
        "processor",
        f"{each[0]:.2f} s of the server, {each[0] / each[1]:.2f} times what is moved ({each[1]:.2f} s)",
        "",
        True,
    )


def _shown(
    times: dict[str, list[float]], said: dict[str, float], count: int, body_bytes: int, arguments: argparse.Namespace
) -> Iterator[Row]:
    workers, is_exact = arguments.workers, arguments.codec == "fp32"
    best = {kind: min(some) for kind, some in times.items()}
    megabytes = f"{workers} x {body_bytes / 1e6:.0f} MB in and out"
    yield "wire", f"{best['wire']:.3f} s for {megabytes} ({_spread(times['wire'])})", "", True
    shown = f"{best['moved']:.3f} s, with {count * 12 / 1e6:.0f} MB of state ({_spread(times['moved'])})"
    yield "moved", shown, "", True
    for kind, limit in (("round", ROUND_LIMIT), ("saved", math.inf)):
        if kind in best:
            ratio = best[kind] / best["moved"]
            shown = f"{best[kind]:.3f} s, {ratio:.2f} times what is moved, {best[kind] / best['wire']:.2f} the wire"
            limited = f"<= {limit:g} times" if limit < math.inf else ""
            yield (
                "round" if kind == "round" else "saved round",
                f"{shown} ({_spread(times[kind])})",
                limited,
                ratio <= limit,
            )
    limit, theory = (EXACT_LIMIT, 8.0) if is_exact else (CODEC_LIMIT, 8.0 + body_bytes / count)
    used = (said["peak"] - said["before"]) / count
    shown = f"{used:.1f} bytes for each of {count / 1e6:.0f}M parameters (theory {theory:.1f})"
    yield "memory", shown, f"<= {limit:.1f}", used <= limit


def _spread(times: list[float]) -> str:
    return f"{min(times):.3f} to {max(times):.3f}"


# --- codecs


def _codecs(seconds: float) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{number}": torch.randn(1024, 4096, generator=generator) for number in range(4)}
    size = sum(one.nbytes for one in tensors.values())
    target = {name: torch.empty_like(one) for name, one in tensors.items()}

    def copy() -> None:
        for name, one in tensors.items():
            target[name].copy_(one)

    bare = _rate(copy, size, seconds)
    yield "memcpy", f"{bare:.2f} GB/s", "", True
    specs = specs_of(tensors)
    for codec in CODECS:
        encoded = encode(tensors, codec)
        there = _rate(lambda codec=codec: encode(tensors, codec), size, seconds)  # type: ignore[misc]
        back = _rate(lambda codec=codec, encoded=encoded: decode(encoded, specs, codec), size, seconds)  # type: ignore[misc]
        shown = f"encodes {there:.2f} GB/s ({bare / there:.1f} memcpys), decodes {back:.2f} GB/s ({bare / back:.1f})"
        yield f"codec {codec}", shown, "", True


def _rate(work: Callable[[], object], size: int, seconds: float) -> float:
    """Gigabytes per second: the best of what fits into the time."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return size / best / 1e9


if __name__ == "__main__":
    sys.exit(main())
