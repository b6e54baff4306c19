"""What ends `onstep train` early: signals (75), time and step limits (0); the same command goes on, exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forked_processes import Processes, output_of
from onstep.checkpoint import checkpoints
from onstep.metrics_log import read_records, without_wall_clock

STRUCK = Path(__file__).with_name("struck.py")
JOBS = Path(__file__).parent.parent / "distributed" / "resume_jobs.py"
SMALL = [
    "dataset.split=80,10,10",
    "dataset.num_workers=0",
    "dataset.seq_length=32",
    "model.seq_length=32",
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_attention_heads=2",
    "model.hidden_dropout=0.1",
    "train.global_batch_size=4",
    "train.train_iters=9",
    "scheduler.lr_warmup_iters=2",
    "validation.eval_on_start=false",
    "validation.eval_interval=4",
    "validation.eval_iters=2",
    "logger.log_interval=2",
    "checkpoint.certify=true",
    "checkpoint.save_interval=null",
    "dist.device=cpu",
]


class Command:
    """`onstep train` in folders of its own, with a callback that sends signals."""

    def __init__(self, processes: Processes, folder: Path, corpus: Path, cache: Path) -> None:
        self._processes = processes
        self.folder = folder
        self._small = [*SMALL, f"dataset.paths=[{corpus}]", f"dataset.cache_dir={cache}"]

    def argv(self, *words: str) -> list[str]:
        return ["train", "--import", str(STRUCK), "callbacks=[struck:Struck]", *self._small, *words]

    def start(self, name: str, *words: str, strike: dict[str, Any] | None = None, **settings: Any) -> int:
        """Start or continue the run of a folder; the exit code."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        (place / "strike.json").unlink(missing_ok=True)
        if strike is not None:
            (place / "strike.json").write_text(json.dumps(strike))
        [code] = self._processes.run(JOBS, "cli", place, {"argv": self.argv(*words), **settings})
        return code

    def steps(self, name: str) -> list[int]:
        return sorted(info.step for info in checkpoints(self.run(name) / "checkpoints"))

    def run(self, name: str) -> Path:
        return self.folder / name / "runs" / "tiny_gpt"

    def status(self, name: str) -> str:
        return str(json.loads((self.run(name) / "run.json").read_text())["status"])

    def ends(self, name: str) -> list[str]:
        """What the end of each process told, the newest last."""
        return (self.folder / name / "ends.txt").read_text().splitlines()

    def outcome(self, name: str) -> dict[str, Any]:
        run = self.run(name)
        return {
            "certificate": json.loads((run / "certificate" / "rank_0.json").read_text()),
            "weights": (run / "model" / "model.safetensors").read_bytes(),
            "journal": [without_wall_clock(record) for record in read_records(run / "trainer_logs.json")],
        }


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, corpus: Path, token_cache: Path) -> Iterator[Command]:
    processes = Processes()
    yield Command(processes, tmp_path_factory.mktemp("command"), corpus, token_cache)
    processes.close()


@pytest.fixture(scope="module")
def whole(command: Command) -> dict[str, Any]:
    """The run that nobody touched."""
    assert command.start("whole") == 0, output_of(command.folder / "whole")
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
    said = output_of(command.folder / name)
    assert code == 75, said
    assert f"({sent}), initiating graceful stop" in said
    assert "Traceback" not in said
    assert command.steps(name) == saved
    assert command.status(name) == "preempted"
    assert command.ends(name)[-1] == "on_run_end preempted"
    assert command.start(name) == 0, output_of(command.folder / name)
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
    assert code == -2, output_of(command.folder / "twice")
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
    assert command.start("duration", "train.exit_duration_in_mins=100") == 0, output_of(command.folder / "duration")
    assert command.status("duration") == "completed"
    assert command.outcome("duration") == whole


def test_ctrl_c_in_a_real_process(command: Command, whole: dict[str, Any]) -> None:
    place = command.folder / "real"
    place.mkdir()
    words = [sys.executable, "-m", "onstep", *command.argv("train.train_iters=100000")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        words, cwd=place, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        journal, deadline = command.run("real") / "trainer_logs.json", time.monotonic() + 120
        while (
            not (journal.exists() and "loss" in journal.read_text())
            and process.poll() is None
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert "the same command continues the run" in said
    assert len(command.steps("real")) == 1
    assert command.status("real") == "preempted"
