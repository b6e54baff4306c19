"""Real signals: a flag, never more; and nothing is left changed when the handler is gone."""

from __future__ import annotations

import json
import logging
import os
import pty
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onstep.errors import ConfigError
from onstep.training.runs import signals
from onstep.training.runs.signals import DistributedSignalHandler, Preempted, signal_numbers
from tests.support.forked_processes import Child, Processes, output_of
from tests.support.pseudo_terminal import read_terminal
from tests.support.waiting import until

JOBS = "tests.support.jobs.signal_jobs"
Start = Callable[..., Child]


@contextmanager
def users_handler(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture
def process(processes: Processes, tmp_path: Path) -> Iterator[Start]:
    """Starts jobs in a directory, each process in a group of its own."""
    started: list[Child] = []

    def start(job: str, **settings: Any) -> Child:
        started.extend(processes.start(JOBS, job, tmp_path, settings))
        return started[-1]

    yield start
    for child in started:
        child.end()


def wait_for(path: Path, running: Child) -> Any:
    """What a process tells, once it does."""
    wait_until(path.exists, running)
    return json.loads(path.read_text())


def wait_until(is_true: Callable[[], bool], running: Child) -> None:
    until(is_true, lambda: f"it has ended: {not running.is_alive}", while_true=lambda: running.is_alive)


def test_a_signal_sets_the_flag_and_says_so_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    with DistributedSignalHandler([signal.SIGTERM, signal.SIGUSR1]) as handler:
        assert (handler.received, handler.signal_name, handler.signals_received()) == (False, None, [False])
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (handler.received, handler.signal_name, handler.signals_received()) == (True, "SIGUSR1", [True])
    assert (
        capfd.readouterr().err
        == "Received SIGUSR1: saving and stopping after this step; a second SIGUSR1 ends the run without saving\n"
    )


def test_in_a_batch_job_no_second_signal_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """SLURM and the launcher send the same one, in their own time."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setattr(signals, "REPEAT_WINDOW_SECONDS", -1.0)
    with DistributedSignalHandler(["SIGUSR2", "SIGTERM"]) as handler:
        for number in (signal.SIGUSR2, signal.SIGUSR2, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert handler.signal_name == "SIGUSR2"
    assert capfd.readouterr().err == "Received SIGUSR2: saving and stopping after this step\n"


def test_on_a_terminal_it_takes_the_place_of_the_bar() -> None:
    ours, terminal = pty.openpty()
    before = os.dup(2)
    os.dup2(terminal, 2)
    try:
        with DistributedSignalHandler(signal.SIGUSR1):
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        os.dup2(before, 2)
    written = read_terminal(ours, "\n")
    for end in (ours, terminal, before):
        os.close(end)
    assert written.startswith("\r\x1b[JReceived SIGUSR1: saving and stopping after this step;\r\n  a second SIGUSR1")


def test_the_handlers_from_before_come_back() -> None:
    def mine(number: int, frame: Any) -> None:
        raise AssertionError("nobody sent it")

    with users_handler(signal.SIGUSR1, mine), users_handler(signal.SIGUSR2, signal.SIG_IGN):
        handler = DistributedSignalHandler(["SIGUSR1", "SIGUSR2"])
        with handler:
            assert signal.getsignal(signal.SIGUSR1) is not mine
        assert signal.getsignal(signal.SIGUSR1) is mine
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
        assert not handler.release()
        with handler:
            assert handler.release()
            assert not handler.release()
            assert signal.getsignal(signal.SIGUSR1) is mine


def test_a_handler_that_was_put_over_ours_stays() -> None:
    def mine(number: int, frame: Any) -> None:
        raise AssertionError("nobody sent it")

    with users_handler(signal.SIGUSR1, signal.SIG_IGN):
        with DistributedSignalHandler("SIGUSR1"):
            signal.signal(signal.SIGUSR1, mine)
        assert signal.getsignal(signal.SIGUSR1) is mine


def test_a_users_handler_is_called_too() -> None:
    got: list[tuple[int, bool]] = []
    handler = DistributedSignalHandler(signal.SIGUSR1)
    with users_handler(signal.SIGUSR1, lambda number, frame: got.append((number, handler.received))):
        with handler:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert got == [(signal.SIGUSR1, True)]


def test_pythons_keyboard_interrupt_is_not_raised() -> None:
    with users_handler(signal.SIGINT, signal.default_int_handler):
        with DistributedSignalHandler(["SIGINT"]) as handler:
            os.kill(os.getpid(), signal.SIGINT)
        assert handler.received
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_same_request_passed_on_at_once_is_not_a_second_signal() -> None:
    got: list[int] = []
    with users_handler(signal.SIGTERM, lambda number, frame: got.append(number)):
        with DistributedSignalHandler(["SIGTERM", "SIGUSR1"]) as handler:
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1):
                os.kill(os.getpid(), number)
            assert handler.signal_name == "SIGTERM"
        assert got == [signal.SIGTERM, signal.SIGTERM]


def test_a_second_signal_leaves_at_once(process: Start, tmp_path: Path) -> None:
    running = process("twice")
    wait_for(tmp_path / "ready", running)
    running.send_signal(signal.SIGTERM)
    assert wait_for(tmp_path / "first", running) == "SIGTERM"
    running.send_signal(signal.SIGINT)
    assert running.wait() == -signal.SIGINT


def test_preempted_ends_the_process_with_75() -> None:
    with pytest.raises(SystemExit) as caught:
        raise Preempted("saved at step 3")
    assert (caught.value.code, str(caught.value)) == (75, "saved at step 3")


def test_an_inner_handler_leaves_the_outer_one_in_place() -> None:
    with users_handler(signal.SIGUSR1, signal.SIG_IGN):
        with DistributedSignalHandler("SIGUSR1") as outer:
            with DistributedSignalHandler("SIGUSR1") as inner:
                os.kill(os.getpid(), signal.SIGUSR1)
                assert (inner.received, inner.signal_name, inner.is_installed) == (True, "SIGUSR1", True)
                assert not inner.release()
            assert outer.received
            assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_entered_twice_is_released_once_the_last_leaves() -> None:
    with users_handler(signal.SIGUSR1, signal.SIG_IGN):
        handler = DistributedSignalHandler("SIGUSR1")
        with handler:
            with handler:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert handler.is_installed
        assert handler.received
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        with handler:
            assert not handler.received


@pytest.mark.parametrize("job", ["", "01000000"])
def test_outside_the_main_thread_nothing_is_installed_and_one_warning_says_so(
    job: str, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if job:
        monkeypatch.setenv("RAY_JOB_ID", job)
    seen: dict[str, Any] = {}

    def body() -> None:
        with DistributedSignalHandler("SIGUSR1") as handler:
            seen["handler"] = signal.getsignal(signal.SIGUSR1)
            seen["installed"] = handler.is_installed
            seen["flags"] = handler.signals_received()

    before = signal.getsignal(signal.SIGUSR1)
    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
    assert seen == {"handler": before, "installed": False, "flags": [False]}
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "signals are off" in caplog.text
    assert "SIGUSR1" in caplog.text
    assert ("newest checkpoint" in caplog.text) is bool(job), "what there is in their place"
    assert ("main thread to enable this" in caplog.text) is not bool(job)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["SIGTREM"], ["'SIGTREM'", "SIGTERM", "SIGUSR1"]),
        (["SIGKILL"], ["SIGKILL", "no process can handle it"]),
        (["SIGSTOP"], ["SIGSTOP", "no process can handle it"]),
        (["SIGALRM"], ["data_timeout"]),
        ([12345], ["12345"]),
    ],
)
def test_names_that_cannot_ask_for_a_stop_are_refused(names: list[Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DistributedSignalHandler(names)
    assert all(word in str(caught.value) for word in ["train.exit_signals", *words])


def test_signals_are_named_or_numbered() -> None:
    assert signal_numbers(["SIGTERM", 15, signal.SIGINT]) == [signal.SIGTERM, signal.SIGINT]


def test_a_forked_process_does_not_set_the_flag(process: Start, tmp_path: Path) -> None:
    running = process("fork")
    assert wait_for(tmp_path / "result", running) == {"child_ended_by": signal.SIGTERM, "received": False}
    assert wait_for(tmp_path / "child", running) is False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_survive_a_signal_to_the_process_group(process: Start, tmp_path: Path, number: signal.Signals) -> None:
    running = process("workers", timeout=60.0, loader="ours")
    wait_for(tmp_path / "seen", running)  # the other worker has begun too
    worker = wait_for(tmp_path / "waiting", running)
    assert worker != running.pid
    os.killpg(running.pid, number)
    (tmp_path / "go").touch()
    result = wait_for(tmp_path / "result", running)
    assert running.wait() == 75
    assert result["seen"] == list(range(8))
    assert (result["received"], result["given_up"]) == (True, None)


def end_with_its_workers(running: Child, loader: str, workers: list[int], output: Path) -> None:
    """A plain loader's workers die of the signal that the group gets; ours, of nothing less than SIGKILL, after it."""
    if loader == "plain":
        os.killpg(running.pid, signal.SIGTERM)
        return
    os.kill(running.pid, signal.SIGTERM)
    wait_until(lambda: "SIGTERM" in output.read_text(), running)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize("loader", ["ours", "plain"])
def test_workers_that_end_with_the_signal_end_the_wait_and_nothing_else(
    process: Start, tmp_path: Path, loader: str
) -> None:
    running = process("workers", timeout=None, loader=loader)
    wait_for(tmp_path / "seen", running)
    end_with_its_workers(running, loader, [wait_for(tmp_path / "waiting", running)], tmp_path / "rank-0.out")
    result = wait_for(tmp_path / "result", running)
    assert running.wait() == 75
    assert result["received"]
    assert "the data workers ended with SIGTERM" in result["given_up"]
    assert result["position"] == {"epoch": 0, "samples_in_epoch": len(result["seen"])}
    assert len(result["seen"]) < 8


@pytest.mark.parametrize("loader", ["ours", "plain"])
def test_workers_that_end_with_the_signal_do_not_interrupt_a_step(process: Start, tmp_path: Path, loader: str) -> None:
    running = process("step", loader=loader)
    end_with_its_workers(running, loader, wait_for(tmp_path / "ready", running), tmp_path / "rank-0.out")
    assert wait_for(tmp_path / "result", running) is True
    assert running.wait() == 0


def test_a_stuck_worker_is_given_up(process: Start, tmp_path: Path) -> None:
    running = process("workers", timeout=0.1, loader="ours")
    wait_for(tmp_path / "waiting", running)
    wait_until(lambda: (tmp_path / "seen").exists(), running)
    os.kill(running.pid, signal.SIGTERM)
    result = wait_for(tmp_path / "result", running)
    assert running.wait() == 75
    assert "train.data_timeout=0.1" in result["given_up"]
    assert result["seen"] == [0, 1]
    assert result["position"] == {"epoch": 0, "samples_in_epoch": 2}


@pytest.mark.distributed
def test_every_rank_learns_which_ranks_were_signalled(processes: Processes, tmp_path: Path) -> None:
    assert processes.run(JOBS, "ranks", tmp_path, {}, ranks=2) == [0, 0], output_of(tmp_path)
    calls = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    assert calls == [[[False, False], [False, True], [False, True]]] * 2
