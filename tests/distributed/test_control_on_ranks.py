"""Two ranks under control: a command at any time is applied after the same step on both, and survives a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from onstep.control.registry import JobInfo, cleanup, is_alive, list_infos, read_info, read_token
from tests.support.forked_processes import Processes
from tests.support.waiting import PATIENCE, until
from tests.support.whole_runs import Ranks

pytestmark = pytest.mark.distributed
JOB = "two-ranks"


@pytest.fixture
def ranks(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Ranks]:
    """The ranks are forked by a server that has another environment: it gets the registry by the settings."""
    processes.load("onstep.control.serving.app", "onstep.control.serving.server", "httpx")
    registry = str(tmp_path / "registry")
    monkeypatch.setenv("ONSTEP_REGISTRY", registry)
    common = {"corpus": str(corpus), "cache": str(token_cache), "job_id": JOB, "registry": registry}
    yield Ranks(processes, tmp_path, "tests.support.jobs.control_jobs", **common)
    for path in tmp_path.glob("*/steps-*.jsonl"):  # of a test that has failed
        for pid in [one["pid"] for one in map(json.loads, path.read_text().splitlines()) if "pid" in one]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Started:
    """A job that runs in the background, and a client of it."""

    def __init__(self, ranks: Ranks, name: str, **settings: Any) -> None:
        self.codes: list[int] = []
        self._ranks, self._name = ranks, name
        self._thread = threading.Thread(target=self._run, args=(settings,), daemon=True)
        self._thread.start()
        info = until(self._entry, lambda: self.output, while_true=self._thread.is_alive)
        assert info is not None
        headers = {"Authorization": f"Bearer {read_token(JOB)}"}
        self.client = httpx.Client(base_url=info.endpoint_url, headers=headers, timeout=PATIENCE, trust_env=False)

    @staticmethod
    def _entry() -> JobInfo | None:
        info = read_info(JOB)
        return info if info is not None and is_alive(info) else None  # a killed job has left its entry

    @property
    def output(self) -> str:
        return self._ranks.output(self._name)

    def _run(self, settings: dict[str, Any]) -> None:
        self.codes = self._ranks.start(self._name, "steered", **settings)

    def send(self, command: str, **data: Any) -> dict[str, Any]:
        content = {"command": command, "data": data, "wait": 20}
        answer = self.client.post(f"/jobs/{JOB}/control", json=content)
        assert answer.status_code == 200, (answer.text, self.output)
        ticket: dict[str, Any] = answer.json()["ticket"]
        assert ticket["status"] == "applied", (ticket, self.output)
        return ticket

    def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.get(f"/jobs/{JOB}/status").json()
        return answer

    def join(self) -> list[int]:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), self.output
        self.client.close()
        return self.codes


def steps_of(directory: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"steps-{rank}.jsonl").read_text().splitlines()]


def in_force(directory: Path, rank: int) -> dict[int, Any]:
    """The factor in force at each step, as the last process of a rank saw it."""
    return {one["step"]: one.get("lr_factor") for one in steps_of(directory, rank) if "step" in one}


def pids(directory: Path) -> Iterator[int]:
    for rank in (0, 1):
        yield [one["pid"] for one in steps_of(directory, rank) if "pid" in one][-1]


def test_commands_at_random_times_apply_after_the_same_step_on_both_ranks(ranks: Ranks) -> None:
    job, draw, tickets = Started(ranks, "job", steps=100_000, watchdog_seconds=3.0), random.Random(0), []
    for number in range(12):
        time.sleep(draw.uniform(0, 0.12))
        tickets.append((1 / (number + 2), job.send("set", key="lr_factor", value=1 / (number + 2))))
    job.send("pause")
    paused = job.status()
    time.sleep(4)  # longer than the watchdog's limit
    assert job.status()["global_step"] == paused["global_step"]
    assert len(paused["memory"]) in (0, 2)
    job.send("resume")
    stacks = job.send("stacks")["result"]
    assert all("job_steered" in stacks[f"rank {rank}"] for rank in (0, 1))
    job.send("abort")
    assert job.join() == [0, 0], job.output
    directory = ranks.directory / "job"
    for rank in (0, 1):
        rows = [one for one in steps_of(directory, rank) if "step" in one]
        for factor, ticket in tickets:
            first = next(one["step"] for one in rows if one.get("lr_factor") == factor)
            assert first == ticket["step"] + 1
            running = max((one["step"] for one in rows if one["at"] <= ticket["received_at"]), default=0)
            assert ticket["step"] <= running + 1, "at most one step after it arrived"
    assert list_infos() == []


def test_after_a_kill_a_factor_that_was_set_by_hand_is_still_in_force(ranks: Ranks) -> None:
    job = Started(ranks, "job", steps=100_000, save_interval=25)
    directory = ranks.directory / "job"
    until(lambda: ranks.steps("job"))
    step = job.send("set", key="lr_factor", value=0.25)["step"]
    for pid in pids(directory):
        os.kill(pid, signal.SIGKILL)
    assert job.join() == [-signal.SIGKILL] * 2
    assert read_info(JOB) is not None, "a killed job leaves its entry"
    newest = max(ranks.steps("job"))
    before = {rank: in_force(directory, rank) for rank in (0, 1)}
    job = Started(ranks, "job", steps=100_000, save_interval=25)
    until(lambda: job.status()["global_step"] >= max(step, newest) + 2)
    assert job.status()["overrides"] == {"lr_factor": 0.25}
    job.send("save_and_stop")
    assert job.join() == [0, 0], job.output
    for rank in (0, 1):
        after = in_force(directory, rank)
        assert after[step + 1] == before[rank].get(step + 1, 0.25) == 0.25
        assert step == newest or after[step] is None, "repeated after its own step, not before"
    assert list_infos() == []
    assert cleanup() == []


def test_a_signal_ends_a_paused_job_with_a_checkpoint(ranks: Ranks) -> None:
    job = Started(ranks, "job", steps=100_000)
    step = job.send("pause")["step"]
    os.kill(next(iter(pids(ranks.directory / "job"))), signal.SIGTERM)
    assert job.join() == [75, 75], job.output
    assert ranks.steps("job") == [step]
    assert list_infos() == []
