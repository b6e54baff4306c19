"""`onstep logs list|summary|tail`: what they find, print and write."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis import LogTail
from onstep.analysis.logs.run_status import ending_of, is_locked
from onstep.cli.logs import tail as logs_tail
from onstep.cli.main import main
from onstep.record import MetricsLog, align
from tests.support.forked_processes import Processes
from tests.support.shell import Shell
from tests.support.waiting import until

RECORDS: list[dict[str, Any]] = [
    {"timestamp": 1.7e9, "global_step": 10, "epoch": 0.5, "loss": 3.0, "learning_rate": 1e-3},
    {"timestamp": 1.7e9, "global_step": 20, "epoch": 1.0, "loss": 2.0, "learning_rate": 1e-4},
    {"timestamp": 1.7e9, "global_step": 20, "epoch": 1.0, "eval_loss": 2.5},
    {"timestamp": 1.7e9, "global_step": 20, "train_runtime": 90.0, "train_samples_per_second": 7.5},
]


def made_run(
    directory: Path, records: list[dict[str, Any]] = RECORDS, *, age: int = 0, status: str = "completed"
) -> Path:
    """A run's directory, last written `age` seconds ago."""
    with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
        for record in records:
            metrics_log.append(record)
    (directory / "run.json").write_text(json.dumps({"status": status}))
    written = time.time() - age
    os.utime(directory / "trainer_logs.json", (written, written))
    return directory


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs, `new` and the older `old`."""
    monkeypatch.chdir(tmp_path)
    made_run(Path("runs/old"), RECORDS[:1], age=100, status="failed")
    made_run(Path("runs/new"))
    return tmp_path


def captured(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["logs", *words]) == 0
    return capsys.readouterr().out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = captured(capsys, "--help")
    for name in ("list", "summary", "tail", "plot", "compare", "report", "replay"):
        assert f"\n  {name} " in text, name


def test_list_shows_runs_newest_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading, *lines = captured(capsys, "list").splitlines()
    assert heading.split() == ["#", "model/run", "status", "modified", "size", "log"]
    assert [line.split()[:3] for line in lines] == [["1", "new", "completed"], ["2", "old", "failed"]]
    assert lines[0].endswith("runs/new/trainer_logs.json")


def test_list_as_json_tells_model_and_bytes(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "output_models/gpt/runs/first").mkdir(parents=True)
    (project / "output_models/gpt/runs/first/trainer_logs.json").write_text("[\n]")
    logs = json.loads(captured(capsys, "list", "--json"))
    assert (logs[0]["model"], logs[0]["run"], logs[0]["status"]) == ("gpt", "first", None)
    assert logs[0]["bytes"] == 3
    assert [log["run"] for log in json.loads(captured(capsys, "list", "--model", "gpt", "--json"))] == ["first"]


def test_summary_takes_the_newest_log_a_name_a_directory_or_a_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = captured(capsys, "summary")
    assert "Summary of new" in newest
    assert "Best Eval Loss" in newest
    for words in ("old", "runs/old", "runs/old/trainer_logs.json"):
        assert "Summary of old" in captured(capsys, "summary", words), words
    assert captured(capsys, "summary", "runs") == newest


@pytest.mark.parametrize("form", ["text", "json", "md", "one-line"])
def test_summary_is_written_to_a_file(project: Path, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = captured(capsys, "summary", "--format", form)
    assert captured(capsys, "summary", "--format", form, "-o", "notes/summary.out") == ""
    assert (project / "notes/summary.out").read_text() == printed
    if form == "json":
        assert json.loads(printed)["total_steps"] == 20


def test_all_logs_in_one_table_or_array(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "runs/torn").mkdir()
    (project / "runs/torn/trainer_logs.json").write_text("no log at all")
    assert main(["logs", "summary", "old", "--all", "--format", "one-line"]) == 0
    out, error = capsys.readouterr()
    heading, *lines = out.splitlines()
    assert heading.startswith("run ")
    assert [line.split()[0] for line in lines] == ["new", "old"]
    assert "time=01:30" in lines[0]
    assert "old is ignored" in error
    assert "skipped: Invalid JSON in log file: runs/torn/trainer_logs.json" in error
    assert [one["run_name"] for one in json.loads(captured(capsys, "summary", "--all", "--format", "json"))] == [
        "new",
        "old",
    ]


def test_one_log_of_all_is_still_under_a_heading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    made_run(Path("runs/only"))
    assert len(captured(capsys, "summary", "--all", "--format", "one-line").splitlines()) == 2
    assert len(captured(capsys, "summary", "--format", "one-line").splitlines()) == 1


def test_records_are_exported_beside_the_summary(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured(capsys, "summary", "new", "--export", "log.csv")
    assert len((project / "log.csv").read_text().splitlines()) == 1 + len(RECORDS)
    assert main(["logs", "summary", "--all", "--export", "log.csv"]) == 1
    assert main(["logs", "summary", "--export", "log.xlsx"]) == 1
    assert "must end in .csv or .parquet" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["summary"], ["summary", "--all"], ["list"], ["tail"]])
def test_project_without_logs_is_an_error(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["logs", *words]) == 1
    assert "no logs found in" in capsys.readouterr().err


def test_mistyped_run_is_reported_with_a_near_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "summary", "nwe"]) == 1
    assert "there is no log 'nwe'. Did you mean 'new'?" in capsys.readouterr().err


def test_unreadable_log_is_an_error_that_names_the_remedy(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "bad.json").write_text("x")
    assert main(["logs", "summary", "bad.json"]) == 1
    assert "pass the trainer_logs.json of a run" in capsys.readouterr().err


def test_tail_shows_the_last_records(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = captured(capsys, "tail", "-n", "2").splitlines()
    assert [line.split("  ", 1)[1].split()[1:4:2] for line in lines] == [["20", "1"], ["20", "90"]]
    assert "eval_loss 2.5" in lines[0]
    assert captured(capsys, "tail", "-n", "0") == ""
    shown = captured(capsys, "tail", "--json", "-n", "99").splitlines()
    assert [json.loads(line) for line in shown] == RECORDS


def test_tail_reads_an_indented_log_but_cannot_follow_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "foreign.json").write_text(json.dumps(RECORDS, indent=2))
    assert "train_runtime 90" in captured(capsys, "tail", "foreign.json", "-n", "1")
    assert main(["logs", "tail", "foreign.json", "-f"]) == 1
    assert "cannot be followed" in capsys.readouterr().err


def test_text_from_a_log_cannot_move_the_cursor(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_run(project / "runs/evil", [{"global_step": 1, "note": "\x1b[2J gone\nnext"}])
    assert captured(capsys, "tail", "evil").count("\n") == 1
    assert "\x1b" not in captured(capsys, "tail", "evil")


def test_following_ends_with_the_run_and_shows_each_record_once(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs_tail, "POLL_SECONDS", 0.01)
    directory = made_run(project / "runs/live", RECORDS[:1], status="running")
    polls, sleep = list[float](), time.sleep
    monkeypatch.setattr(logs_tail.time, "sleep", lambda seconds: polls.append(seconds) or sleep(seconds))

    def wait_until_read() -> None:
        before = len(polls)
        while len(polls) < before + 2:  # a look that ends may have begun before
            sleep(0.001)

    def run_on() -> None:
        wait_until_read()
        with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
            metrics_log.append({"global_step": 20, "loss": 2.0})
            metrics_log.append({"global_step": 30, "loss": 9.0})
        wait_until_read()
        align(directory / "trainer_logs.json", 20)
        with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
            for step in range(30, 80, 10):
                metrics_log.append({"global_step": step, "loss": 1.0})
                wait_until_read()
            (directory / "run.json").write_text(json.dumps({"status": "stopped"}))

    writer = threading.Thread(target=run_on, daemon=True)
    writer.start()
    assert main(["logs", "tail", "live", "-f", "--json"]) == 0
    writer.join()
    out, error = capsys.readouterr()
    shown = [json.loads(line) for line in out.splitlines()]
    assert [record["global_step"] for record in shown] == [10, 20, 30, 30, 40, 50, 60, 70]
    assert "-- the run was stopped --" in error
    assert "the log was rewritten" in error


def test_following_ends_on_an_interrupt(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_run(project / "runs/live", RECORDS[:1], status="running")

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(logs_tail.time, "sleep", interrupt)
    assert "loss 3" in captured(capsys, "tail", "live", "-f")


def test_following_a_log_without_a_run_record_ends_after_its_final_record(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs_tail, "POLL_SECONDS", 0.001)
    (project / "runs/new/run.json").unlink()
    assert main(["logs", "tail", "new", "-f"]) == 0
    assert "-- the final record is written --" in capsys.readouterr().err


class Scripted(LogTail):
    """Tells of a log that is begun anew after its final record, and is then quiet for a long time."""

    num_polls = 0

    def last(self, number: int) -> list[dict[str, Any]]:
        return RECORDS

    def news(self) -> list[dict[str, Any]]:
        self.num_polls += 1
        self.was_rewritten = self.num_polls == 2
        return RECORDS[:1] if self.num_polls == 2 else RECORDS[3:] if self.num_polls == 500 else []


def test_log_begun_anew_ends_with_its_own_final_record(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs_tail, "POLL_SECONDS", 0)
    monkeypatch.setattr(logs_tail, "LogTail", Scripted)
    (project / "runs/new/run.json").unlink()
    shown = captured(capsys, "tail", "new", "-f", "--json").splitlines()
    assert [json.loads(line) for line in shown] == [*RECORDS, RECORDS[0], RECORDS[3]]


def test_killed_run_is_told_from_a_running_one(tmp_path: Path) -> None:
    directory = made_run(tmp_path / "run", status="running")
    log = directory / "trainer_logs.json"
    assert ending_of(log) is None  # nothing tells whether it runs
    lock = directory / ".run.lock"
    lock.write_text(f"process 1 on {socket.gethostname()}\n")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not is_locked(lock):
            pytest.skip("this system does not list the locks of its processes")
        assert ending_of(log) is None
    assert "the run's process is gone" in str(ending_of(log))
    lock.write_text("process 1 on another-machine\n")
    assert ending_of(log) is None


def test_reader_of_a_pipe_may_leave_early(project: Path) -> None:
    made_run(project / "runs/long", [{"global_step": step, "text": "x" * 200} for step in range(5000)])
    command = f"{sys.executable} -m onstep logs tail long -n 5000 | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_real_run_is_followed_to_its_end(processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path) -> None:
    words = ["dataset.split=80,10,10", f"dataset.paths=[{corpus}]", f"dataset.cache_dir={token_cache}", "run.name=live"]
    words += ["dataset.seq_length=32", "model.seq_length=32", "model.num_layers=1", "model.hidden_size=32"]
    words += ["model.num_attention_heads=2", "train.global_batch_size=4", "train.train_iters=30", "dist.device=cpu"]
    words += ["scheduler.lr_warmup_iters=2", "validation.eval_iters=2", "logger.log_interval=1"]
    shell = Shell(processes, tmp_path)
    training = shell.start("train", *words)
    try:
        log = tmp_path / "runs/live/trainer_logs.json"
        until(log.exists, while_true=lambda: training.is_alive)
        done = shell.onstep("logs", "tail", "live", "-n", "1000", "--follow", "--json")
        assert training.wait() == 0
    finally:
        training.end()
    assert done.returncode == 0, done.stderr
    assert "-- the run completed --" in done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == json.loads(log.read_text())
