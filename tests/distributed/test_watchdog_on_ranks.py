"""A rank that fails, hangs or dies ends the whole run, with one report that names it; a slow one does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onstep.config import ConfigContainer, save_yaml
from tests.support import torchrun
from tests.support.forked_processes import Child, Processes, held_port, output_of
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.distributed

JOBS = "tests.support.jobs.hanging_jobs"
HOURS = "10_000"
OWN_INTERRUPTS = {"train.exit_signal_handler": False}


def reports(directory: Path) -> list[str]:
    """What was printed as a report, in all outputs."""
    texts = (path.read_text() for path in directory.glob("rank-*.out"))
    return [one for text in texts for one in re.findall(r"(?ms)^first failure: .*?(?=^={50})", text)]


def run(processes: Processes, directory: Path, *, ranks: int = 2, **settings: Any) -> tuple[list[int], str]:
    """Exit codes, and the one report."""
    began = time.monotonic()
    codes = processes.run(JOBS, "train", directory, settings, ranks=ranks)
    assert time.monotonic() - began < PATIENCE, "the processes were ended from outside"
    found = reports(directory)
    assert len(found) == 1, (codes, output_of(directory))
    written = list((directory / "run").glob("first-culprit-*.txt"))
    assert len(written) == 1, written
    assert found[0] in written[0].read_text()
    assert all(codes), codes
    return codes, found[0]


def stacks_of(report: str, rank: int) -> str:
    found = re.search(rf"(?ms)^stacks of rank {rank} .*?(?=^stacks of rank|\Z)", report)
    assert found, report
    return found[0]


def run_json(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "run" / "run.json").read_text())
    return content


@pytest.mark.parametrize("suspect", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_rank_that_raises_is_named_with_its_own_exception(
    processes: Processes, tmp_path: Path, suspect: int
) -> None:
    _, report = run(processes, tmp_path, how="raise", suspect=suspect)
    first = report.splitlines()[0]
    assert first.startswith(f"first failure: rank {suspect} failed first at step 3"), report
    assert "callback 'Misbehaves' is handling 'on_step_end'" in first
    assert "hanging_jobs.py:" in first
    assert no_dumps_of(report)
    assert first.endswith("in do_raise: ValueError: a fault of its own")
    exception = report.split(f"exception of rank {suspect}:")[1].split("stacks of rank 0")[0]
    assert 'raise ValueError("a fault of its own")' in exception
    assert "Connection" not in exception
    assert "in agree" in stacks_of(report, 1 - suspect), "the other rank waits for a decision"
    assert run_json(tmp_path)["status"] == "failed"
    assert f"rank {suspect} failed first" in run_json(tmp_path)["error"]
    calls = json.loads((tmp_path / f"told-{suspect}.json").read_text())
    assert calls == ["exception ValueError", "end failed"]


def test_a_rank_that_decides_alone_does_not_wait_for_readers_of_its_lost_store(
    processes: Processes, tmp_path: Path
) -> None:
    assert all(processes.run(JOBS, "train", tmp_path, {"how": "raise_alone", "suspect": 0}, ranks=2))
    assert "The store of the process group does not respond" in output_of(tmp_path)
    assert json.loads((tmp_path / "lingers.json").read_text()) == 0.0


@pytest.mark.parametrize("suspect", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_sleeps_in_a_callback_is_named_with_it(processes: Processes, tmp_path: Path, suspect: int) -> None:
    _, report = run(processes, tmp_path, how="sleep", suspect=suspect)
    first = report.splitlines()[0]
    assert f"rank {suspect} hangs" in first
    assert "at step 3" in first
    assert "callback 'Misbehaves' is handling 'on_step_end'" in first
    assert re.search(r"hanging_jobs.py:\d+ in do_sleep$", first), first
    assert f"rank {1 - suspect}: step 3, it waits for other ranks in a collective" in report
    assert no_dumps_of(report), "what os._exit leaves"
    assert f"time.sleep({HOURS})" in stacks_of(report, suspect)
    assert "in all_reduce" in stacks_of(report, 1 - suspect)
    assert f"rank {suspect} hangs" in run_json(tmp_path)["error"]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_whose_data_never_comes_is_named_with_the_line_that_reads_it(
    processes: Processes, tmp_path: Path, num_workers: int
) -> None:
    _, report = run(processes, tmp_path, how="read", num_workers=num_workers)
    assert "rank 1 hangs" in report.splitlines()[0]
    assert "while it is reading a batch" in report.splitlines()[0]
    head = report.split("last activity of each rank")[0]
    assert re.search(r"hanging_jobs.py:\d+ in __getitem__$", head, re.MULTILINE), report
    assert "in __getitem__" in run_json(tmp_path)["error"]
    assert ("its data worker" in head) == bool(num_workers)
    until(lambda: no_process_of(tmp_path), lambda: "data workers are ended too")


def no_dumps_of(report: str) -> bool:
    """Whether the files of the processes that a report names are gone."""
    pids = re.findall(r"stacks of rank \d+ \(process (\d+)\)", report)
    return not [one for pid in pids for one in Path(tempfile.gettempdir()).glob(f"onstep-stacks-*-{pid}-*")]


def no_process_of(directory: Path) -> bool:
    """Whether no process works in the directory any more."""
    for one in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if one.readlink() == directory:
                return False
    return True


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_collective_is_named(processes: Processes, tmp_path: Path) -> None:
    _, report = run(processes, tmp_path, how="late")
    first = report.splitlines()[0]
    assert "rank 1 hangs" in first
    assert "while it is computing a step" in first
    assert re.search(r"hanging_jobs.py:\d+ in forward$", first), first
    assert "rank 0: step 2, it waits for other ranks in a collective (computing a step)" in report


@pytest.mark.slow
def test_a_block_that_is_not_called_by_all_ranks_is_said_to_be(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(JOBS, "leave_out_a_block", tmp_path, {}, ranks=2)
    assert all(codes), output_of(tmp_path)
    (report,) = reports(tmp_path)
    assert "rank 0 waits to gather the weights of a block, and rank 1 waits in another collective" in report, report
    assert "set fsdp.wrap to classes that leave out that of the module" in report


@pytest.mark.slow
@pytest.mark.parametrize("suspect", [0, 1])
def test_a_stopped_process_is_named_and_ended(processes: Processes, tmp_path: Path, suspect: int) -> None:
    codes, report = run(processes, tmp_path, how="stop", suspect=suspect, pace=0.4)
    assert f"rank {suspect} hangs: its process has been stopped" in report.splitlines()[0], report
    assert codes[suspect] == -signal.SIGKILL
    assert "none: the rank does not answer" in stacks_of(report, suspect)
    assert no_dumps_of(stacks_of(report, suspect)), "what a killed process leaves"


@pytest.mark.slow
def test_a_rank_that_never_gives_the_interpreter_back_is_named_with_its_stack(
    processes: Processes, tmp_path: Path
) -> None:
    _, report = run(processes, tmp_path, how="hold", pace=0.4)
    assert "rank 1 hangs" in report.splitlines()[0], report
    assert "its interpreter does not answer" in report.splitlines()[0]
    assert "in do_hold" in stacks_of(report, 1)


@pytest.mark.slow
def test_a_simulated_fault_is_found_like_a_real_one(processes: Processes, tmp_path: Path) -> None:
    fault = {"ft.simulate_fault": True, "ft.simulated_fault_rank": 1, "ft.simulated_fault_base_delay": 1.0}
    overrides = {**fault, "ft.simulated_fault_type": "rank_hung"}
    codes, report = run(processes, tmp_path, how="nothing", pace=0.3, max_steps=40, overrides=overrides)
    assert "rank 1 hangs: its process has been stopped" in report.splitlines()[0], report
    assert codes[1] == -signal.SIGKILL
    assert "rank 1 will fail (rank_hung) in 1." in output_of(tmp_path)


@pytest.mark.slow
def test_a_slow_rank_is_waited_for(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(
        JOBS, "train", tmp_path, {"how": "dawdle", "seconds": 1.8, "seconds_allowed": 3.0, "max_steps": 3}, ranks=2
    )
    assert codes == [0, 0], output_of(tmp_path)
    assert not reports(tmp_path)


def test_a_run_that_ends_well_leaves_nothing(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(JOBS, "train_and_look", tmp_path, {"how": "nothing", "last_words": 0.5}, ranks=2)
    assert codes == [0, 0], output_of(tmp_path)
    for rank in (0, 1):
        assert json.loads((tmp_path / f"threads-{rank}.json").read_text()) == ["MainThread"]
    assert all(not path.read_text() for path in tmp_path.glob("rank-*.out")), output_of(tmp_path)


@pytest.mark.slow
def test_what_a_rank_last_did_is_known_from_the_first_step_on(processes: Processes, tmp_path: Path) -> None:
    _, report = run(processes, tmp_path, how="stop", at=1)
    first = report.splitlines()[0]
    assert "rank 1 hangs: its process has been stopped" in first
    assert "setting up" not in first


@pytest.mark.slow
def test_a_slow_start_is_not_counted(processes: Processes, tmp_path: Path) -> None:
    """The other rank waits for longer than the limit, which begins only when all have come."""
    settings = {"how": "start", "seconds": 7.0, "seconds_allowed": 3.0, "pace": 0.1}
    codes = processes.run(JOBS, "train", tmp_path, settings, ranks=2)
    assert codes == [0, 0], output_of(tmp_path)
    assert not reports(tmp_path)


def test_a_rank_that_is_interrupted_alone_is_named(processes: Processes, tmp_path: Path) -> None:
    _, report = run(processes, tmp_path, how="interrupt", overrides=OWN_INTERRUPTS)
    first = report.splitlines()[0]
    assert first.startswith("first failure: rank 1 failed first at step 3"), report
    assert first.endswith("in do_interrupt: KeyboardInterrupt"), first
    assert "rank 1 failed first" in run_json(tmp_path)["error"]


def test_an_interrupt_of_all_ranks_is_no_riddle(processes: Processes, tmp_path: Path) -> None:
    settings = {"how": "interrupt_all", "seconds_allowed": 60.0, "overrides": OWN_INTERRUPTS}
    codes = processes.run(JOBS, "train", tmp_path, settings, ranks=2)
    assert all(codes), codes
    assert -signal.SIGKILL not in codes, "the processes were ended from outside"
    assert not reports(tmp_path)
    assert not list((tmp_path / "run").glob("first-culprit-*"))


def test_an_error_that_all_ranks_raise_alike_is_no_riddle(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(JOBS, "train", tmp_path, {"how": "raise", "suspect": "all"}, ranks=2)
    assert codes == [1, 1]
    assert not reports(tmp_path)
    assert output_of(tmp_path).count("ValueError: a fault of its own") == 2
    assert run_json(tmp_path)["error"] == (
        "ValueError: a fault of its own (raised by callback 'Misbehaves' during 'on_step_end')"
    )


FAULTS = [
    ("trainer", "on_step_end", "collective", 1, "is gone .* at step 1", " at .*fault_jobs.py:[0-9]+ in <lambda>"),
    ("pretrain", "on_step_end", "kill", 0, "is gone .* at step 1", ""),
    ("trainer", "on_step_end", "exit", 1, "exited with code 3 at step 1", " at .*fault_jobs.py.* cannot continue"),
    ("trainer", "on_init_end", "exit", 1, "exited with code 3 at step 0", " at .*fault_jobs.py.* cannot continue"),
    ("pretrain", "on_init_end", "os_exit", 1, "is gone .* at step 0", ""),
    ("pretrain", "on_test_end", "raise", 1, "failed first at step 4", " at .*ValueError: a fault of the test"),
    ("pretrain", "state_dict", "hang", 1, "hangs: no progress .* at step 0", " at .*fault_jobs.py"),
    ("trainer", "on_step_end", "stop_iteration", 1, "failed first at step 1", " at .*fault_jobs.py:[0-9]+ in fault"),
]
LIKE_THEM = [
    ("pretrain", "on_step_end", "exit0", 0, "exited with code 0 at step 1", " at .*fault_jobs.py.* cannot continue"),
    ("trainer", "on_run_end", "exit0", 1, "exited with code 0 at step 4", " at .*fault_jobs.py.* cannot continue"),
    ("trainer", "on_step_end", "barrier", 1, "hangs: no progress .* at step 1", " at .*fault_jobs.py"),
    ("trainer", "on_run_end", "raise", 1, "failed first at step 4", " at .*ValueError: a fault of the test"),
    ("trainer", "on_run_end", "collective", 0, "hangs: no progress .* at step 4", " at .*fault_jobs.py"),
]
EVENTS = (
    "on_init_end on_data_init_start on_train_start on_epoch_start on_step_begin on_forward_backward_end "
    "on_substep_end on_pre_optimizer_step on_optimizer_step on_train_step_end on_step_end on_log on_eval_end "
    "on_checkpoint_save on_epoch_end on_train_end on_test_end on_run_end"
)


@pytest.mark.parametrize(
    ("door", "event", "fault", "suspect", "what", "where"),
    [*FAULTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in LIKE_THEM)],
)
def test_the_place_of_a_fault_is_true_and_all_ranks_fail(
    processes: Processes,
    tmp_path: Path,
    corpus: Path,
    token_cache: Path,
    door: str,
    event: str,
    fault: str,
    suspect: int,
    what: str,
    where: str,
) -> None:
    error = fail(processes, tmp_path, corpus, token_cache, door, event, fault, suspect)
    assert re.match(f"rank {suspect} {what}, while callback 'Faulty' is handling '{event}'{where}", error), error


def test_the_store_outlives_a_rank_that_reads_the_diagnosis_late(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    settings = {"ranks": 3, "reads_late": 1}
    error = fail(processes, tmp_path, corpus, token_cache, "pretrain", "on_train_start", "exit", 2, **settings)
    there = (
        r"rank 2 exited with code 3 at step 0, while callback 'Faulty' is handling 'on_train_start' at .*fault_jobs.py"
    )
    assert re.match(f"{there}.* cannot continue", error), error
    assert not reports(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("fault", ["raise", "memory", "interrupt", "exit", "os_exit", "kill", "abort", "hang"])
def test_a_fault_at_any_event_is_named(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, fault: str, ranks: int
) -> None:
    for event in EVENTS.split():
        for door in ("pretrain", "trainer") if event != "on_test_end" else ("pretrain",):
            there = tmp_path / f"{door}-{event}"
            error = fail(processes, there, corpus, token_cache, door, event, fault, ranks - 1, ranks=ranks)
            assert f"rank {ranks - 1} " in error, (door, event, error)
            assert f"callback 'Faulty' is handling '{event}'" in error, (door, event, error)


def fail(
    processes: Processes,
    directory: Path,
    corpus: Path,
    cache: Path,
    door: str,
    event: str,
    fault: str,
    suspect: int,
    ranks: int = 2,
    **more: Any,
) -> str:
    """What run.json says of a run with this fault, which must have failed on all ranks."""
    settings = {"event": event, "fault": fault, "suspect": suspect, **more}
    settings |= {"corpus": str(corpus / "colorsys.py"), "cache": str(cache)}
    started = processes.start("tests.support.jobs.fault_jobs", door, directory, settings, ranks=ranks)
    try:
        codes = [one.wait() for one in started]  # each ends by itself
    finally:
        for one in started:
            one.end()
    if fault == "exit0":
        del codes[suspect]
    assert all(codes), (codes, output_of(directory))
    content = run_json(directory)
    assert content["status"] == "failed", output_of(directory)
    return str(content["error"])


@pytest.mark.parametrize(
    ("door", "then"), [("trainer", ("on_run_end", "os_exit")), ("pretrain", ("on_exception", "kill"))]
)
@pytest.mark.slow
def test_an_error_is_known_where_a_callback_called_with_it_ends_the_process(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, door: str, then: tuple[str, str]
) -> None:
    error = fail(processes, tmp_path, corpus, token_cache, door, "on_step_end", "raise", 1, then=then)
    assert re.match("rank 1 failed first at step 1, while callback 'Faulty' is handling 'on_step_end' at ", error), (
        error
    )
    assert error.endswith("ValueError: a fault of the test")
    assert "exception of rank 1:" in reports(tmp_path)[0]


def test_a_rank_that_is_killed_as_it_resumes_is_placed_at_the_step_of_the_checkpoint(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    fail(processes, tmp_path, corpus, token_cache, "pretrain", "on_step_end", "raise", 1, nth=3)
    error = fail(processes, tmp_path, corpus, token_cache, "pretrain", "on_checkpoint_load", "kill", 1)
    assert re.match("rank 1 is gone .* at step 2, while callback 'Faulty' is handling 'on_checkpoint_load'", error), (
        error
    )


@pytest.mark.parametrize(("method", "event"), [("evaluate", "on_eval_step_end"), ("predict", "on_test_start")])
@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_later_evaluation_is_named(
    processes: Processes, tmp_path: Path, method: str, event: str
) -> None:
    """The other rank, which is past the event and knows the killed one, gets the SIGTERM that torchrun sends."""
    settings = {"event": event, "fault": "hang", "suspect": 1, "method": method, "seconds": 10.0}
    first, second = processes.start("tests.support.jobs.fault_jobs", "evaluate", tmp_path, settings, ranks=2)
    try:
        wait_until_there(tmp_path, f"at {event}", 1)
        wait_until_there(tmp_path, f"past {event}", 1)
        until(lambda: knows(first, second))
        second.send_signal(signal.SIGKILL)
        assert second.wait() == -signal.SIGKILL
        first.send_signal(signal.SIGTERM)
        assert first.wait() == 1
    finally:
        first.end()
    assert len(reports(tmp_path)) == 1, output_of(tmp_path)
    assert run_json(tmp_path)["status"] == "failed"
    error = run_json(tmp_path)["error"]
    assert re.match(f"rank 1 is gone .* at step 4, while callback 'Faulty' is handling '{event}'", error), error


def test_a_rank_that_a_second_signal_ends_is_said_to_be(processes: Processes, tmp_path: Path) -> None:
    ranks = processes.start(JOBS, "train", tmp_path, {"how": "ask_twice"}, ranks=2)
    try:
        codes = [one.wait() for one in ranks]
    finally:
        for one in ranks:
            one.end()
    assert codes[1] == -signal.SIGTERM, output_of(tmp_path)
    (report,) = reports(tmp_path)
    assert re.match(r"first failure: rank 1 is gone .* at step 3, while it is ending after a second SIGTERM", report)


@pytest.mark.parametrize("suspect", [0, "all"])
def test_sigterm_ends_a_later_evaluation_at_once(processes: Processes, tmp_path: Path, suspect: int | str) -> None:
    """A rank in a collective learns of the signal once the others are gone."""
    settings = {"event": "on_eval_step_end", "fault": "hang", "suspect": suspect, "method": "evaluate", "seconds": 60.0}
    ranks = processes.start("tests.support.jobs.fault_jobs", "evaluate", tmp_path, settings, ranks=2)
    try:
        wait_until_there(tmp_path, "at on_eval", 2 if suspect == "all" else 1)
        time.sleep(0.5)
        for one in ranks:
            one.send_signal(signal.SIGTERM)
        assert [one.wait() for one in ranks] == [-signal.SIGTERM] * 2, output_of(tmp_path)
    finally:
        for one in ranks:
            one.end()
    assert run_json(tmp_path)["status"] == "completed"
    assert not reports(tmp_path)


def test_a_second_sigterm_ends_an_evaluation_in_which_a_rank_is_gone(processes: Processes, tmp_path: Path) -> None:
    """Rank 0 has the store, without which the other one is not told."""
    settings = {"event": "on_eval_step_end", "fault": "hang", "suspect": 1, "method": "evaluate", "seconds": 60.0}
    first, second = processes.start("tests.support.jobs.fault_jobs", "evaluate", tmp_path, settings, ranks=2)
    try:
        wait_until_there(tmp_path, "at on_eval", 1)
        until(lambda: knows(second, first))
        first.send_signal(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        second.send_signal(signal.SIGTERM)
        time.sleep(1.5)
        assert second.is_alive
        second.send_signal(signal.SIGTERM)
        assert second.wait() == -signal.SIGTERM, "by the signal, not by the watchdog after 60 seconds"
    finally:
        second.end()


def wait_until_there(directory: Path, words: str, ranks: int) -> None:
    """Wait until so many ranks have said that they are at an event where they fail, or past it."""
    until(
        lambda: sum(words in path.read_text() for path in directory.glob("rank-*.out")) >= ranks,
        lambda: output_of(directory),
    )


def knows(one: Child, other: Child) -> bool:
    """Whether a rank has opened the file in which it finds the last words of another."""
    for file in Path(f"/proc/{one.pid}/fd").iterdir():
        with suppress(OSError):  # it may be closed again
            if f"-{other.pid}-" in file.readlink().name:
                return True
    return False


def test_a_start_that_fails_after_a_kill_does_not_say_that_it_runs(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    settings = {"suspect": 0, "corpus": str(corpus / "colorsys.py"), "cache": str(token_cache)}
    for fault, event, status in (("kill", "on_train_start", "running"), ("memory", "on_data_init_start", "failed")):
        one = {**settings, "fault": fault, "event": event}
        assert processes.run("tests.support.jobs.fault_jobs", "pretrain", tmp_path, one)[0]
        assert run_json(tmp_path)["status"] == status
    assert run_json(tmp_path)["error"] == (
        "MemoryError: a fault of the test (raised by callback 'Faulty' during 'on_data_init_start')"
    )


@pytest.mark.slow
def test_ranks_that_all_wait_in_the_set_up_are_found(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    settings = {"suspect": 0, "corpus": str(corpus / "colorsys.py"), "cache": str(token_cache)}
    first = {**settings, "fault": "kill", "event": "on_step_end", "nth": 3}
    assert all(processes.run("tests.support.jobs.fault_jobs", "pretrain", tmp_path, first, ranks=2))
    error = fail(processes, tmp_path, corpus, token_cache, "pretrain", "on_checkpoint_load", "barrier", 0)
    assert re.match(r"rank 0 hangs: no progress for \d", error), error
    assert "callback 'Faulty' entered a collective while handling 'on_checkpoint_load', which other ranks did" in error


def test_a_rank_that_exits_by_itself_is_no_fault(processes: Processes, tmp_path: Path) -> None:
    codes = processes.run(JOBS, "train", tmp_path, {"how": "exit"}, ranks=2)
    assert codes[1] == 7
    assert not reports(tmp_path)


@pytest.mark.parametrize("suspect", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.process
@pytest.mark.slow
def test_the_others_end_when_a_rank_is_killed_under_torchrun(tmp_path: Path, suspect: int) -> None:
    error = failed(tmp_path, how="kill", suspect=suspect, pace=0.4, seconds_allowed=30.0)
    assert error.count("first failure: ") == 1, error
    assert f"first failure: rank {suspect} is gone" in error
    assert f"rank {suspect} is gone" in run_json(tmp_path)["error"], "what `onstep why` begins with"
    assert f"stacks of rank {1 - suspect}" in error
    assert "in all_reduce" in error


@pytest.mark.slow
def test_the_others_end_when_the_process_with_the_store_is_killed(tmp_path: Path) -> None:
    """Without torchrun the store of the process group lives in rank 0."""
    settings = {"how": "kill", "suspect": 0, "pace": 0.4, "seconds_allowed": 30.0}
    with held_port() as port:
        ranks = [start_rank(rank, port, tmp_path, **settings) for rank in range(2)]
        error, _ = (one.communicate(timeout=PATIENCE)[1] for one in reversed(ranks))
    assert ranks[0].returncode == -signal.SIGKILL
    assert ranks[1].returncode not in (0, -signal.SIGTERM), error
    assert error.count("first failure: rank 0 is gone") == 1, error
    assert "stacks of rank 1" in error


@pytest.mark.slow
def test_with_ten_seconds_all_is_over_within_twenty(tmp_path: Path) -> None:
    for how in ("raise", "sleep", "read", "late", "kill", "stop"):
        directory = tmp_path / how
        directory.mkdir()
        error = failed(directory, how=how, seconds_allowed=10.0, pace=0.4, num_workers=2 if how == "read" else 0)
        assert "first failure: rank 1" in error, error
        began = float((directory / "began").read_text())
        assert time.time() - began < 20, how


@pytest.mark.slow
def test_the_command_line_names_the_first_failure_too(tiny_config: ConfigContainer, tmp_path: Path) -> None:
    tiny_config.train.global_batch_size, tiny_config.train.micro_batch_size = 4, 2
    tiny_config.ft.watchdog_seconds = 6.0
    tiny_config.run.output_dir, tiny_config.run.name = str(tmp_path), "run"
    save_yaml(tiny_config, tmp_path / "config.yaml")
    words = ["-m", "onstep", "train", str(tmp_path / "config.yaml")]
    words += [f"callbacks=[{JOBS}:SleepsOnRankOne]"]
    code, said = torchrun.finish(words, tmp_path)
    assert code == 1
    assert said.count("first failure: rank 1 hangs") == 1, said
    assert "callback 'SleepsOnRankOne' is handling 'on_step_end'" in said
    assert "rank 1 hangs" in run_json(tmp_path)["error"]
    assert len(list((tmp_path / "run").glob("first-culprit-*.txt"))) == 1


def failed(directory: Path, **settings: Any) -> str:
    """What a failing run under torchrun printed."""
    code, said = torchrun.finish(torchrun.job(JOBS, "train", settings), directory)
    assert code == 1, said
    return said


def start_rank(rank: int, port: int, directory: Path, **settings: Any) -> subprocess.Popen[str]:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment = {**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-m", JOBS, "train", str(directory), json.dumps(settings)]
    return subprocess.Popen(
        command, env=environment, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
