"""Workers and servers as real processes, which are killed, stopped, cut off or misheard at every state."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.diloco.fault_run import JOBS, FaultRun, minority_is_left
from tests.support.diloco.fault_scenarios import ALL, SHORT, Scenario, run_scenario, run_storm
from tests.support.forked_processes import Processes

pytestmark = [pytest.mark.faults, pytest.mark.process]

Count = Callable[[str, object], None]
MARKS = ("closed", "written", "persisted")
"""Points of a commit: before anything is written, when the tensors are, and when the commit is on disk."""


@pytest.fixture
def at_work(processes: Processes) -> Processes:
    """The server that forks, with what the jobs import."""
    processes.load(JOBS, "onstep.diloco.server.app", "uvicorn", "httpx")
    return processes


def commit_interrupted(mark: str, number: int, processes: Processes, directory: Path) -> Counter[str]:
    """The server is killed, or stopped for a while, at a point of the commit of version 3."""
    run = FaultRun(processes, directory)
    try:
        run.start(mark=mark, signal=number)
        run.until((directory / "marked").exists)
        if number == signal.SIGKILL:
            run.server.wait()
            run.start_server()
        else:
            run.pause(run.server, 1.0)
        run.advance(3)
        run.end()
        return run.check() + Counter(faults=1)
    finally:
        run.close()


@pytest.mark.parametrize("scenario", SHORT, ids=str)
def test_after_a_fault_all_have_the_same_parameters_and_every_step_counts_once(
    scenario: Scenario, at_work: Processes, tmp_path: Path
) -> None:
    counts = run_scenario(scenario, at_work, tmp_path / "run")
    assert counts["rounds"] >= 3


@pytest.mark.parametrize("mark", MARKS)
def test_a_server_killed_during_a_commit_continues_with_it_done_or_not_begun(
    mark: str, at_work: Processes, tmp_path: Path
) -> None:
    commit_interrupted(mark, signal.SIGKILL, at_work, tmp_path / "run")


def test_a_minority_never_commits_and_those_cut_off_train_on(at_work: Processes, tmp_path: Path) -> None:
    run = FaultRun(at_work, tmp_path / "run")
    try:
        minority_is_left(run)
    finally:
        run.close()


@pytest.fixture(scope="module")
def totals() -> Iterator[Counter[str]]:
    """What the long sweep counts; printed at its end."""
    total: Counter[str] = Counter()
    yield total
    if total:
        print("\nDiLoCo, faults over real processes:", ", ".join(f"{name} {total[name]}" for name in sorted(total)))


def note(total: Counter[str], counts: Counter[str], record_property: Count) -> None:
    total.update(counts)
    for name, count in counts.items():
        record_property(name, count)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ALL, ids=str)
def test_every_fault_at_every_state(
    scenario: Scenario, at_work: Processes, tmp_path: Path, totals: Counter[str], record_property: Count
) -> None:
    counts = run_scenario(scenario, at_work, tmp_path / "run")
    note(totals, counts + Counter({f"faults: {scenario.act}": 1}), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
@pytest.mark.parametrize("mark", MARKS)
def test_every_point_of_a_commit(
    mark: str, number: signal.Signals, at_work: Processes, tmp_path: Path, totals: Counter[str], record_property: Count
) -> None:
    counts = commit_interrupted(mark, number, at_work, tmp_path / "run")
    note(totals, counts + Counter({f"faults: {number.name} in a commit": 1}), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_storm_of_faults_at_random_instants(
    seed: int, at_work: Processes, tmp_path: Path, totals: Counter[str], record_property: Count
) -> None:
    note(totals, run_storm(seed, 15, at_work, tmp_path / "run"), record_property)
