"""However a job ends, nothing keeps its process alive, and its entry in the registry is gone or can be removed."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onstep.control.registry import cleanup, is_alive, list_infos, read_info
from tests.support.forked_processes import Processes, output_of
from tests.support.waiting import until

JOB, JOBS = "ending", "tests.support.jobs.control_jobs"
Begin = Callable[..., Any]


@pytest.fixture
def begin(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Begin:
    """Start a job of one rank, and wait until it is in the registry."""
    registry = str(tmp_path / "registry")
    monkeypatch.setenv("ONSTEP_REGISTRY", registry)
    common = {"corpus": str(corpus), "cache": str(token_cache), "job_id": JOB, "registry": registry}

    def start(name: str = "job", **settings: Any) -> Any:
        (child,) = processes.start(JOBS, "steered", tmp_path / name, {**common, "steps": 100_000, **settings})
        return child

    return start


def wait_for(is_true: Callable[[], Any], what: str, path: Path) -> None:
    until(is_true, lambda: (what, output_of(path)))


def is_served() -> bool:
    info = read_info(JOB)
    if info is None or not is_alive(info):
        return False
    with socket.socket() as client:
        return client.connect_ex((info.host, info.port)) == 0


@pytest.mark.parametrize(
    ("settings", "strike", "code"),
    [
        ({"steps": 4}, None, 0),
        ({"raises_at": 4}, None, 1),
        ({"leaves_at": 4}, None, 3),
        ({}, signal.SIGTERM, 75),
        ({}, signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_job_leaves_no_process_no_socket_and_no_entry(
    begin: Begin, tmp_path: Path, settings: dict[str, Any], strike: int | None, code: int
) -> None:
    child = begin(**settings)
    if strike is not None:
        wait_for(is_served, "to serve", tmp_path / "job")
        port = list_infos()[0].port
        with socket.create_connection(("127.0.0.1", port)):  # an idle client must not delay the end
            os.kill(child.pid, strike)
            assert child.wait() == code, output_of(tmp_path / "job")
        with socket.socket() as client:
            assert client.connect_ex(("127.0.0.1", port)) != 0
    else:
        assert child.wait() == code, output_of(tmp_path / "job")
    assert cleanup() == ([JOB] if strike == signal.SIGKILL else [])
    assert list_infos() == []
    assert list((tmp_path / "registry").iterdir()) == []


def test_a_second_job_of_the_same_name_is_refused_before_it_trains(begin: Begin, tmp_path: Path) -> None:
    first = begin("first")
    wait_for(is_served, "to serve", tmp_path / "first")
    second = begin("second")
    assert second.wait() == 1
    assert f"A job with job_id='{JOB}' is running (process {first.pid}" in output_of(tmp_path / "second")
    assert '"step"' not in (tmp_path / "second" / "steps-0.jsonl").read_text()
    assert is_served()
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    third = begin("third", steps=3)
    assert third.wait() == 0, "a dead job's name is free"


def test_without_the_callback_no_socket_listens(begin: Begin, tmp_path: Path) -> None:
    ends = {}
    for name, is_controlled in (("without", False), ("with", True)):
        child = begin(name, is_controlled=is_controlled, steps=3, counts_sockets=True)
        assert child.wait() == 0, output_of(tmp_path / name)
        ends[name] = int((tmp_path / name / "listening").read_text())
    assert ends == {"without": 1, "with": 2}, "the one is the store of the process group"
