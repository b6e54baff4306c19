"""`onstep train` that leaves early: what it says, what it records, and its progress log over three starts."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest

from onstep.record import read_records
from tests.support.forked_processes import output_of
from tests.support.train_command import Command

HEAVY = "callbacks=[struck:Struck,struck:Heavy]"
INTERVAL = ["train.exit_interval=4"]


def said(command: Command, name: str) -> str:
    """What the process printed that ended last."""
    path = command.directory / name / "rank-0.out"
    text = path.read_text()
    path.unlink()
    return text


def record(command: Command, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((command.run(name) / "run.json").read_text())
    return content


def decisions(command: Command, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (command.run(name) / "decisions.jsonl").read_text().splitlines()]


def evaluated(command: Command, name: str) -> list[tuple[str, int]]:
    """The evaluations in the metrics log, with their steps."""
    records = list(read_records(command.run(name) / "trainer_logs.json"))
    kinds = (("eval", "eval_loss"), ("test", "test_loss"))
    return [(kind, one["global_step"]) for one in records for kind, key in kinds if key in one]


@pytest.fixture(scope="module")
def progress(command: Command) -> list[list[str]]:
    """The log after three starts: two leave at their exit interval, the third ends with the run."""
    statuses = []
    for _ in range(3):
        assert command.start("progress", *INTERVAL, "logger.log_progress=true", HEAVY) == 0, said(command, "progress")
        statuses.append(command.status("progress"))
    assert statuses == ["paused", "paused", "completed"]
    path = command.run("progress") / "checkpoints" / "progress.txt"
    return [line.split("\t") for line in path.read_text().splitlines()]


def test_three_starts_leave_six_lines_in_the_progress_log(progress: list[list[str]]) -> None:
    assert [line[3:5] for line in progress] == [
        ["Starting job"],
        ["Saved checkpoint", "Iteration: 4"],
        ["Starting job"],
        ["Saved checkpoint", "Iteration: 8"],
        ["Starting job"],
        ["Saved checkpoint", "Iteration: 9"],
    ]
    moments = [datetime.strptime(line[0], "%Y-%m-%d %H:%M:%S") for line in progress]
    assert moments == sorted(moments)
    assert {line[2] for line in progress} == {"# GPUs: 1"}


def numbers(line: list[str]) -> list[float]:
    """Job throughput, cumulative throughput, operations."""
    names = ("Job throughput: ", "Cumulative throughput: ", "Floating-point operations: ")
    fields = zip(line[5:8], names, (" MODEL_TFLOP/s/GPU", " MODEL_TFLOP/s/GPU", ""), strict=True)
    return [float(field.removeprefix(name).removesuffix(unit)) for field, name, unit in fields]


def test_each_job_has_a_throughput_of_its_own_and_one_since_the_first_start(progress: list[list[str]]) -> None:
    saves = [numbers(line) for line in progress if line[3] == "Saved checkpoint"]
    assert all(job > 0 and cumulative > 0 for job, cumulative, _ in saves)
    operations = [flops for _, _, flops in saves]
    assert operations == sorted(operations)
    assert operations[1] == pytest.approx(2 * operations[0], rel=0.01), "the second job goes on from the first"
    assert saves[2][0] < saves[2][1] * 20, "one step's operations in the third job, not all nine"


def test_an_exit_interval_says_where_it_left_and_is_no_failure(command: Command) -> None:
    assert command.start("interval", *INTERVAL) == 0
    text = said(command, "interval")
    assert re.search(r"^exiting program at iteration 4$", text, re.MULTILINE)
    assert re.search(r"^\d\d:\d\d:\d\d Training stopped at step 4: loss [\d.]+ at the start", text, re.MULTILINE)
    assert record(command, "interval")["status"] == "paused"
    assert record(command, "interval").get("error") is None
    saved, left = decisions(command, "interval")
    assert (saved["flag"], saved["reason"]) == ("saved", "before exiting (interval)")
    assert (left["author"], left["reason"], left["step"]) == ("exit_interval", "exiting program at iteration 4", 4)
    assert evaluated(command, "interval") == [("eval", 4)]


@pytest.mark.parametrize("words", [["train.exit_interval=4", "logger.log_interval=25"], ["logger.log_interval=0"]])
def test_a_run_without_a_logged_loss_is_no_failure(command: Command, words: list[str]) -> None:
    name = f"unlogged-{len(words)}"
    assert command.start(name, *words, "validation.eval_iters=0") == 0, said(command, name)
    text = said(command, name)
    assert "Finished at step" in text
    assert "  metrics log " in text
    assert "loss plot" not in text


def test_an_exit_interval_that_divides_the_run_evaluates_at_the_end(command: Command) -> None:
    assert command.start("divides", "train.exit_interval=3", "train.train_iters=3") == 0
    text = said(command, "divides")
    assert "exiting program" not in text
    assert record(command, "divides")["status"] == "completed"
    assert evaluated(command, "divides") == [("eval", 3), ("test", 3)]


@pytest.mark.parametrize("steps", [0, 3])
def test_an_exit_duration_says_how_long_it_took_and_is_no_failure(command: Command, steps: int) -> None:
    name = f"duration-{steps}"
    minutes, strike = (1e-9, None) if steps == 0 else (100, {"event": "on_step_end", "number": steps, "late": True})
    assert command.start(name, f"train.exit_duration_in_mins={minutes}", strike=strike) == 0
    assert re.search(r"^exiting program after \d+\.\d\d minutes$", said(command, name), re.MULTILINE)
    assert record(command, name)["status"] == "paused"
    assert record(command, name).get("error") is None
    left = decisions(command, name)[-1]
    assert (left["author"], left["step"]) == ("exit_duration_in_mins", steps)
    assert command.steps(name) == ([steps] if steps else [])


def test_a_slow_rank_pauses_the_run_and_the_same_command_goes_on(command: Command) -> None:
    found = "rank 1 is slow in data"
    strike = {"event": "on_step_end", "number": 5, "straggler": found}
    assert command.start("slow", strike=strike) == 0
    assert f"Exiting program due to straggler detection. {found}\n" in said(command, "slow")
    assert command.steps("slow") == [5]
    assert record(command, "slow")["status"] == "paused"
    left = decisions(command, "slow")[-1]
    assert left["reason"] == f"Exiting program due to straggler detection. {found}"
    assert command.start("slow") == 0, output_of(command.directory / "slow")
    assert record(command, "slow")["status"] == "completed"


def test_a_signal_is_recorded_as_a_preemption_and_not_as_a_failure(command: Command) -> None:
    strike = {"event": "on_step_end", "number": 2, "signal": "SIGTERM"}
    assert command.start("signal", strike=strike) == 75
    text = said(command, "signal")
    assert "exiting program" not in text, "the handler has said it"
    assert re.search(r"Training stopped at step 2: loss [\d.]+ at the start, [\d.]+ at the end$", text, re.MULTILINE)
    assert "preempted at step 2; the same command continues the run." in text
    assert record(command, "signal")["status"] == "preempted"
    assert record(command, "signal").get("error") is None


def test_times_of_parts_are_printed_where_they_are_asked_for(command: Command) -> None:
    """`onstep train` shows a bar, so Megatron Bridge's lines come only for the option."""
    assert command.start("untimed", "train.train_iters=3") == 0
    assert "time across ranks" not in said(command, "untimed")
    assert command.start("timed", "train.train_iters=3", "logger.timing_log_level=1") == 0
    text = said(command, "timed")
    for name in ("model-and-optimizer-setup", "forward-backward", "optimizer", "evaluate", "save-checkpoint"):
        assert re.search(rf"^    {name} \.+: \(\d+\.\d\d, \d+\.\d\d\)$", text, re.MULTILINE), name


@pytest.mark.parametrize("saves", ["checkpoint.async_save=false", "checkpoint.async_save=true"])
def test_a_run_whose_last_save_failed_is_not_complete_and_the_same_command_saves_its_end(
    command: Command, saves: str
) -> None:
    name, words = f"unsaved-{saves[-4:]}", ["checkpoint.on_save_error=continue", saves]
    assert command.start(name, "train.exit_interval=4", *words) == 0
    in_the_way = command.run(name) / "checkpoints" / "checkpoint-9"
    in_the_way.write_text("a file")
    assert command.start(name, *words) == 1
    assert "run the same command again" in said(command, name)
    content = record(command, name)
    assert (content["status"], content["step"], command.steps(name)) == ("failed", 9, [4])
    assert "checkpoint of step 9" in content["error"]

    in_the_way.unlink()
    assert command.start(name, *words) == 0
    assert (command.status(name), command.steps(name)) == ("completed", [4, 9])
    assert "error" not in record(command, name)
