"""The last upload of a run: signals are answered and obeyed, nothing is lost, and other ranks wait for it."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.faulty_proxy import Fault, Proxy
from tests.support.forked_processes import Child, Processes, output_of
from tests.support.mirrored_runs import MirroredRuns, check_no_secret, committed, lease_of
from tests.support.object_store import STORE
from tests.support.waiting import until

pytestmark = pytest.mark.process

LATER = 1.2
"""Seconds after which a signal does not repeat the one before."""


@pytest.fixture
def runs(proxy: Proxy, processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> MirroredRuns:
    return MirroredRuns(processes, corpus, token_cache, f"{STORE}/{tmp_path.name}", proxy.url)


def held(number: int, method: str, path: str) -> Fault:
    """Requests that write weights have to wait."""
    return "wait" if method in ("PUT", "POST") and "/model/" in path else "pass"


def says(machine: Path, words: str, child: Child) -> None:
    until(lambda: words in output_of(machine), lambda: output_of(machine), while_true=lambda: child.is_alive)


def recorded(machine: Path) -> dict[str, Any]:
    [path] = machine.glob("scratch/**/run/run.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def uploading(runs: MirroredRuns, machine: Path, ranks: int = 1) -> list[Child]:
    """A run that has saved after a signal, has said so after another one, and uploads."""
    children = runs.start(machine, slow=0.3, save_interval=None, ranks=ranks)
    says(machine, "step 2 is done", children[0])
    for child in children:
        child.send_signal(signal.SIGTERM)
    until(lambda: recorded(machine)["status"] == "preempted", lambda: output_of(machine))
    time.sleep(LATER)
    for child in children:
        child.send_signal(signal.SIGTERM)
    says(machine, "received SIGTERM: the last upload", children[0])
    return children


def test_a_signal_is_answered_while_the_last_upload_goes_on(runs: MirroredRuns, proxy: Proxy, tmp_path: Path) -> None:
    """On two ranks, of which the other one may not end before, as launchers end the rest soon after one rank."""
    proxy.decide, machine = held, tmp_path / "machine"
    children = uploading(runs, machine, ranks=2)
    step = recorded(machine)["step"]
    assert f"continues; left: checkpoint {step} and files of the run, " in output_of(machine)
    assert all(child.is_alive for child in children)
    assert committed(f"{runs.url}/run") == []
    proxy.go.set()
    assert [child.wait() for child in children] == [75, 75], output_of(machine)
    assert committed(f"{runs.url}/run") == [step]
    assert lease_of(f"{runs.url}/run").is_released


def test_a_second_signal_leaves_the_upload_to_the_next_start(runs: MirroredRuns, proxy: Proxy, tmp_path: Path) -> None:
    proxy.decide, machine = held, tmp_path / "machine"
    [child] = uploading(runs, machine)
    time.sleep(LATER)
    child.send_signal(signal.SIGINT)
    assert child.wait() == 75, output_of(machine)
    said, step = output_of(machine), recorded(machine)["step"]
    assert f"is left because of a second signal, SIGINT: {runs.url}/run lacks checkpoint {step} and" in said
    assert "The same command on this machine uploads it" in said
    assert committed(f"{runs.url}/run") == []
    proxy.go.set()
    assert runs.train(machine, save_interval=None) == 0, output_of(machine)
    taken = [json.loads(line)["step"] for line in (machine / "taken-0.jsonl").read_text().splitlines()]
    assert taken == list(range(1, 12))  # from what was left here
    assert committed(f"{runs.url}/run") == [11, step]
    check_no_secret(tmp_path, runs.url)


def seconds_left(machine: Path) -> float:
    """Of its SLURM job, when the run on the machine had ended."""
    return float((machine / "left.json").read_text())


@pytest.mark.slow
def test_a_job_ends_so_early_that_its_upload_fits(runs: MirroredRuns, proxy: Proxy, tmp_path: Path) -> None:
    """An upload lasts 4 s; the second job knows it from the lease, and leaves without having uploaded anything."""

    def slow(number: int, method: str, path: str) -> Fault:
        if held(number, method, path) == "wait":
            time.sleep(4.0)
        return "pass"

    proxy.decide, words = slow, ["train.exit_margin_seconds=6", "train.train_iters=100"]
    for number, interval in ((1, 4), (2, None)):
        machine = tmp_path / f"machine-{number}"
        [child] = runs.start(machine, slow=1.0, words=words, ends_in=40.0, save_interval=interval)
        assert child.wait() == 75, output_of(machine)
        assert seconds_left(machine) > 0
        assert committed(f"{runs.url}/run")[0] == recorded(machine)["step"] < 100
        assert lease_of(f"{runs.url}/run").upload_seconds >= 4.0
    print(f"{[round(seconds_left(one), 1) for one in sorted(tmp_path.glob('machine-*'))]} s were left")


@pytest.mark.slow
def test_a_job_whose_store_is_away_ends_with_75_before_its_end(
    runs: MirroredRuns, proxy: Proxy, tmp_path: Path
) -> None:
    proxy.decide, machine = held, tmp_path / "machine"
    words = ["train.exit_margin_seconds=12", "train.train_iters=100"]
    [child] = runs.start(machine, slow=1.0, words=words, save_interval=None, ends_in=30.0)
    assert child.wait() == 75, output_of(machine)
    assert seconds_left(machine) > 0
    assert f"because of the end of the SLURM job: {runs.url}/run lacks checkpoint" in output_of(machine)
    proxy.go.set()
    assert runs.train(machine, words=words) == 0, output_of(machine)
    assert committed(f"{runs.url}/run")[0] == 100
