"""The server's thread in real processes: it keeps none alive, leaves nothing open, and ends no training."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from onstep.control.registry import Registration, cleanup, list_infos
from onstep.control.serving.app import build_app
from onstep.control.serving.server import ControlServer
from onstep.http.access import Access
from tests.support.control_server import TOKEN
from tests.support.waiting import PATIENCE

SERVES = f"""
import os, sys, threading, time
from onstep.control.feed import Feed
from onstep.control.inbox import Inbox
from onstep.control.registry import JobInfo, Registration, describe_jobs
from onstep.http.access import Access
from onstep.control.serving.app import build_app
from onstep.control.serving.server import ControlServer
from onstep.control.serving.served_job import LiveJob
entry, jobs = Registration("job").open(), {{}}
app = build_app(lambda: jobs, access=Access("{TOKEN}"), listed=describe_jobs, title="a job")
server = ControlServer(app, port=0)
info = JobInfo.of_this_process("job", port=server.port)
jobs["job"] = LiveJob(info, Feed(), Inbox())
server.start()
entry.publish(info, "{TOKEN}")
print(server.port, flush=True)
sys.stdin.readline()
"""
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def serving(code: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that serves a job until a line is written to it, and then runs `code`."""
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", SERVES + code], **streams)  # type: ignore[call-overload]
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


ENDS = {
    "returns": ("", 0),
    "raises": ("raise ZeroDivisionError('as it happens')", 1),
    "exits": ("sys.exit(7)", 7),
    "stops the server": ("server.stop(); entry.close(); assert threading.active_count() == 1", 0),
    "is terminated": ("os.kill(os.getpid(), 15); time.sleep(60)", -signal.SIGTERM),
    "is interrupted": ("os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    "is killed": ("os.kill(os.getpid(), 9); time.sleep(60)", -signal.SIGKILL),
}


@pytest.mark.process
@pytest.mark.parametrize("way", ENDS)
def test_a_process_ends_at_once_however_it_ends_even_with_open_streams(registry: Path, way: str) -> None:
    code, status = ENDS[way]
    with serving(code) as (process, port), socket.create_connection(("127.0.0.1", port)):
        stream = httpx.stream("GET", f"http://127.0.0.1:{port}/jobs/job/events", headers=HEADERS, timeout=PATIENCE)
        with stream as answer:
            next(answer.iter_bytes())
            _, errors = process.communicate("end\n", timeout=PATIENCE)
        assert process.returncode == status
        assert ("as it happens" in errors) == (way == "raises")
        assert ("control" in errors) is False or way == "raises"
        assert TOKEN not in errors
    assert cleanup() == ([] if way == "stops the server" else ["job"])
    assert list_infos() == []
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # nobody holds it


@pytest.mark.process
def test_a_forked_worker_holds_neither_the_port_nor_a_connection(registry: Path) -> None:
    fork = "if os.fork() == 0:\n    print(os.getpid(), flush=True)\n    server.stop()\ntime.sleep(60)"
    with serving(fork) as (process, port), socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        connection.recv(100)
        process.stdin.write("fork\n")
        process.stdin.flush()
        worker = psutil.Process(int(process.stdout.readline()))
        assert httpx.get(f"http://127.0.0.1:{port}/jobs", headers=HEADERS, timeout=PATIENCE).status_code == 200
        assert not [one for one in worker.net_connections() if one.laddr and one.laddr.port == port]
        process.kill()
        process.wait()
        try:
            while connection.recv(65536):
                pass  # ends although the worker lives
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
        finally:
            worker.kill()


@pytest.mark.process
def test_nothing_is_imported_or_opened_without_a_server(registry: Path) -> None:
    code = (
        "import sys, onstep, psutil\n"
        "assert not {'starlette', 'uvicorn', 'httpx', 'platformdirs', 'torch'} & set(sys.modules)\n"
        "assert psutil.Process().net_connections('all') == []\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)
    assert not registry.exists()


def test_the_thread_leaves_signals_and_loggers_as_they_are(registry: Path) -> None:
    names = ("", "uvicorn", "uvicorn.error", "uvicorn.access", "asyncio")
    handlers = [(signal.SIGINT, signal.getsignal(signal.SIGINT)), (signal.SIGTERM, signal.getsignal(signal.SIGTERM))]
    loggers = [(one.level, one.propagate, one.disabled, list(one.handlers)) for one in map(logging.getLogger, names)]
    server = ControlServer(build_app(dict, access=Access(TOKEN), listed=list, title=""), port=0)
    server.start()
    assert httpx.get(f"http://127.0.0.1:{server.port}/", timeout=PATIENCE).status_code == 200
    assert [(number, signal.getsignal(number)) for number, _ in handlers] == handlers
    assert [
        (one.level, one.propagate, one.disabled, list(one.handlers)) for one in map(logging.getLogger, names)
    ] == loggers
    server.stop()


def test_a_server_that_was_never_started_is_closed_by_stop(registry: Path) -> None:
    with Registration("job") as entry:
        server = ControlServer(build_app(dict, access=Access(None, None), listed=list, title=""), uds=entry.socket_path)
        server.stop()
        assert not entry.socket_path.exists()
