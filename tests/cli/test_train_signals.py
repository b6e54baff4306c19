"""What ends `onstep train` early: signals (75), time and step limits (0); the same command goes on, exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tests.support.forked_processes import output_of
from tests.support.train_command import Command
from tests.support.waiting import PATIENCE, until


@pytest.fixture(scope="module")
def whole(command: Command) -> dict[str, Any]:
    """The run that nobody touched."""
    assert command.start("whole") == 0, output_of(command.directory / "whole")
    outcome = command.outcome("whole")
    assert len(outcome["certificate"]) == 9
    return outcome


@pytest.mark.parametrize(
    ("sent", "event", "number", "saved"),
    [
        ("SIGINT", "on_forward_backward_start", 3, [3]),
        ("SIGUSR1", "on_step_begin", 5, [5]),
        ("SIGTERM", "on_data_init_start", 1, []),
        ("SIGINT", "on_train_start", 1, []),
        ("SIGUSR1", "on_eval_step_end", 1, [4]),
        ("SIGTERM", "on_eval_step_end", 5, [9]),
        ("SIGTERM", "on_test_step_end", 1, [9]),
    ],
)
def test_a_signal_saves_once_and_leaves_with_75_and_the_same_command_goes_on(
    command: Command, whole: dict[str, Any], sent: str, event: str, number: int, saved: list[int]
) -> None:
    name = f"{sent}-{event}-{number}"
    code = command.start(name, strike={"signal": sent, "event": event, "number": number})
    said = output_of(command.directory / name)
    assert code == 75, said
    assert f"Received {sent}: saving and stopping after this step" in said
    assert "Traceback" not in said
    assert command.steps(name) == saved
    assert command.status(name) == "preempted"
    assert command.ends(name)[-1] == "on_run_end preempted"
    assert command.start(name) == 0, output_of(command.directory / name)
    assert command.status(name) == "completed"
    for part, value in whole.items():
        assert command.outcome(name)[part] == value, part


def test_a_signal_while_workers_read_is_exact_too(command: Command, whole: dict[str, Any]) -> None:
    words = ["dataset.num_workers=2"]
    strike = {"signal": "SIGTERM", "event": "on_step_begin", "number": 4}
    assert command.start("workers", *words, strike=strike) == 75
    assert command.steps("workers") == [4]
    assert command.start("workers", *words) == 0
    assert command.outcome("workers") == whole


def test_a_second_signal_during_the_save_leaves_at_once(command: Command, whole: dict[str, Any]) -> None:
    first = {"signal": "SIGINT", "event": "on_step_end", "number": 3}
    assert command.start("twice", strike=first) == 75
    again = [{"signal": "SIGINT", "operation": "fsync", "number": 2}]
    code = command.start("twice", strike={**first, "number": 2}, strikes=again, repeat_window=0.0)
    assert code == -2, output_of(command.directory / "twice")
    assert command.steps("twice") == [3]
    assert command.start("twice") == 0
    assert command.outcome("twice") == whole


def test_exit_interval_pauses_the_run_and_the_same_command_goes_on(command: Command, whole: dict[str, Any]) -> None:
    words = ["train.exit_interval=4"]
    for steps in ([4], [4, 8]):
        assert command.start("interval", *words) == 0
        assert command.steps("interval") == steps
        assert command.status("interval") == "paused"
        assert command.ends("interval")[-2:] == ["on_train_end", "on_run_end stopped"]
    assert command.start("interval", *words) == 0
    assert command.status("interval") == "completed"
    assert command.outcome("interval") == whole


def test_an_exit_interval_that_divides_the_run_ends_it_as_completed(command: Command, whole: dict[str, Any]) -> None:
    assert command.start("divides", "train.exit_interval=9") == 0
    assert command.status("divides") == "completed"
    assert command.ends("divides") == ["on_train_end", "on_run_end completed"]
    assert command.outcome("divides") == whole


def test_exit_duration_pauses_the_run_where_the_clock_says_so(command: Command, whole: dict[str, Any]) -> None:
    assert command.start("duration", "train.exit_duration_in_mins=1e-9") == 0
    assert command.status("duration") == "paused"
    assert command.ends("duration")[-2:] == ["on_train_end", "on_run_end stopped"]
    assert command.start("duration", "train.exit_duration_in_mins=100") == 0, output_of(command.directory / "duration")
    assert command.status("duration") == "completed"
    assert command.outcome("duration") == whole


def test_ctrl_c_in_a_real_process(command: Command, whole: dict[str, Any]) -> None:
    place = command.directory / "real"
    place.mkdir()
    words = [sys.executable, "-m", "onstep", *command.argv("train.train_iters=100000")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        metrics_log = command.run("real") / "trainer_logs.json"
        until(
            lambda: metrics_log.exists() and "loss" in metrics_log.read_text(),
            while_true=lambda: process.poll() is None,
        )
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, said
    assert "the same command continues the run" in said
    assert len(command.steps("real")) == 1
    assert command.status("real") == "preempted"
