"""Workers and servers as real processes, which are killed, stopped, cut off or misheard at every state."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from tests.support.diloco.fault_modes import MODES, SYNC, Mode
from tests.support.diloco.fault_run import JOBS, FaultRun, minority_is_left, server_is_away
from tests.support.diloco.fault_scenarios import (
    ALL,
    OF_ROUNDS,
    SHORT,
    Loss,
    Scenario,
    restored_while_pending,
    run_scenario,
    run_storm,
)
from tests.support.forked_processes import Processes

pytestmark = [pytest.mark.faults, pytest.mark.process]

Count = Callable[[str, object], None]
Totals = defaultdict[str, Counter[str]]
MARKS = ("closed", "written", "persisted")
"""Points of a commit: before anything is written, when the tensors are, and when the commit is on disk."""

FULL = ("sync", "streaming int8 with checkpoints", "async int8 with checkpoints")


@pytest.fixture
def at_work(processes: Processes) -> Processes:
    """The server that forks, with what the jobs import."""
    processes.load(JOBS, "onstep.diloco.server.serving.app", "uvicorn", "httpx")
    return processes


def commit_interrupted(
    mark: str, number: int, processes: Processes, directory: Path, mode: Mode = SYNC
) -> Counter[str]:
    """The server is killed, or stopped for a while, at a point of the commit of version 3."""
    run = FaultRun(processes, directory, mode)
    try:
        run.start(mark=mark, signal=number)
        run.until((directory / "marked").exists)
        if number == signal.SIGKILL:
            run.server.wait()
            run.start_server()
        else:
            run.until(lambda: run.server.is_stopped)
            run.pause(run.server, 1.0)
        run.advance(3)
        run.end()
        return run.check() + Counter(faults=1)
    finally:
        run.close()


@pytest.mark.parametrize(("mode", "scenario"), SHORT, ids=str)
def test_after_a_fault_all_have_the_same_parameters_and_every_step_counts_once(
    mode: str, scenario: Scenario, at_work: Processes, tmp_path: Path
) -> None:
    counts = run_scenario(scenario, MODES[mode], at_work, tmp_path / "run")
    assert counts["rounds"] >= 3
    assert counts["steps_counted"] > 0


@pytest.mark.parametrize("mark", MARKS)
def test_a_server_killed_during_a_commit_continues_with_it_done_or_not_begun(
    mark: str, at_work: Processes, tmp_path: Path
) -> None:
    commit_interrupted(mark, signal.SIGKILL, at_work, tmp_path / "run")


def test_what_was_pending_at_a_checkpoint_counts_once(at_work: Processes, tmp_path: Path) -> None:
    mode = MODES["int8 with checkpoints"]
    counts = restored_while_pending("its answers are lost", mode, at_work, tmp_path / "run")
    assert counts["restored with a pending submission"] == 1
    assert counts["restored progress kept"] == 0, "the server has counted it"


def test_what_nobody_counted_since_a_checkpoint_is_continued(at_work: Processes, tmp_path: Path) -> None:
    """The server may just have the submission, or commit those of others, when all are cut off: then once more."""
    mode = MODES["int8 with checkpoints"]
    for attempt in range(4):
        counts = restored_while_pending("all are cut off", mode, at_work, tmp_path / f"run {attempt}")
        assert counts["restored with a pending submission"] == 1
        if counts["restored progress kept"] == 1:
            return
    pytest.fail("what nobody counted was given up, four times of four")


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.slow
def test_after_an_outage_of_the_server_every_step_of_all_workers_counts_once(
    mode: str, at_work: Processes, tmp_path: Path
) -> None:
    run = FaultRun(at_work, tmp_path / "run", MODES[mode], bound=1.0)
    try:
        counts = server_is_away(run, num_steps=5)
    finally:
        run.close()
    assert counts["steps_counted"] > 0
    assert mode == "sync" or not counts["means after an outage"]


@pytest.mark.slow
def test_a_minority_never_commits_and_those_cut_off_train_on(at_work: Processes, tmp_path: Path) -> None:
    run = FaultRun(at_work, tmp_path / "run")
    try:
        minority_is_left(run)
    finally:
        run.close()


@pytest.fixture(scope="module")
def totals() -> Iterator[Totals]:
    """What the long sweep counts in each mode; printed at its end."""
    found: Totals = defaultdict(Counter)
    yield found
    for mode, total in found.items():
        counts = ", ".join(f"{name} {total[name]}" for name in sorted(total))
        print(f"\nDiLoCo, faults over real processes, {mode}: {counts}")


def note(total: Counter[str], counts: Counter[str], record_property: Count) -> None:
    total.update(counts)
    for name, count in counts.items():
        record_property(name, count)


SWEEP = [(mode, scenario) for mode in MODES for scenario in (ALL if mode in FULL else OF_ROUNDS)]
"""All that can happen in the modes that have everything; in the others, what concerns rounds."""


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "scenario"), SWEEP, ids=str)
def test_every_fault_at_every_state(
    mode: str, scenario: Scenario, at_work: Processes, tmp_path: Path, totals: Totals, record_property: Count
) -> None:
    counts = run_scenario(scenario, MODES[mode], at_work, tmp_path / "run")
    note(totals[mode], counts + Counter({f"faults: {scenario.act}": 1}), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda one: one.name)
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("mode", FULL)
def test_every_point_of_a_commit(
    mode: str,
    mark: str,
    number: signal.Signals,
    at_work: Processes,
    tmp_path: Path,
    totals: Totals,
    record_property: Count,
) -> None:
    counts = commit_interrupted(mark, number, at_work, tmp_path / "run", MODES[mode])
    note(totals[mode], counts + Counter({f"faults: {number.name} in a commit": 1}), record_property)


@pytest.mark.slow
@pytest.mark.parametrize("loss", get_args(Loss))
@pytest.mark.parametrize("mode", [mode for mode in MODES if MODES[mode].has_checkpoints])
def test_every_checkpoint_with_a_pending_submission(
    mode: str, loss: Loss, at_work: Processes, tmp_path: Path, totals: Totals, record_property: Count
) -> None:
    counts = restored_while_pending(loss, MODES[mode], at_work, tmp_path / "run")
    note(totals[mode], counts + Counter({f"faults: restored after {loss}": 1}), record_property)


STORM = {"kill worker": 12, "kill server": 8, "silent line": 10, "absence": 5, "leave": 5}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seed"), [(mode, 100 + seed) for seed, mode in enumerate((*MODES, "sync"))])
def test_a_storm_of_kills_silent_lines_absences_joins_and_leaves(
    mode: str, seed: int, at_work: Processes, tmp_path: Path, totals: Totals, record_property: Count
) -> None:
    note(totals[mode], run_storm(seed, STORM, MODES[mode], at_work, tmp_path / "run"), record_property)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "seed"), [(mode, seed) for seed, mode in enumerate((*MODES, *FULL))])
def test_a_storm_of_faults_at_random_instants(
    mode: str, seed: int, at_work: Processes, tmp_path: Path, totals: Totals, record_property: Count
) -> None:
    note(totals[mode], run_storm(seed, 10, MODES[mode], at_work, tmp_path / "run"), record_property)
