"""The commands on hostile logs: values of the wrong kind, endless lines, thousands of keys."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis import LogTail, TrainingLog
from onstep.cli.main import main
from onstep.files.durability import try_to_sync
from onstep.record import read_records
from onstep.record.writer import JsonLogWriter

MAX_LINE_BYTES = 16 << 20


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def step_record(step: int, **more: Any) -> dict[str, Any]:
    return {"timestamp": 1.7e9 + step, "global_step": step, "epoch": step / 10, "loss": 3.0 / (1 + step), **more}


def write_log(records: Iterable[dict[str, Any]], name: str = "run", **replaced: str) -> Path:
    """A metrics log; `replaced` are values (texts) replaced by raw JSON."""
    path = Path("runs", name, "trainer_logs.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(map(json.dumps, records)) + "\n]"
    for value, raw in replaced.items():
        text = text.replace(json.dumps(value), raw)
    path.write_text(text)
    return path


def run(*words: str) -> int:
    try:
        return main(list(words))
    except SystemExit as ended:
        return int(ended.code or 0)


DEEP = "[" * 3000 + "]" * 3000
HOSTILE = ["1" + "0" * 400, "-1e308", "1e308", "NaN", "-Infinity", "[1, [2]]", '{"a": 1}', '"text"', "9" * 5000, DEEP]
COMMANDS = [
    ["logs", "summary", "run"],
    ["logs", "summary", "run", "--format", "one-line"],
    ["logs", "summary", "run", "--format", "json", "--export", "x.csv"],
    ["logs", "tail", "run"],
    ["logs", "tail", "run", "--json"],
    ["logs", "compare", "run", "good"],
]
KEYS = ["global_step", "loss", "epoch", "timestamp", "learning_rate", "train_runtime", "total_tokens", "eval_loss"]


@pytest.mark.parametrize("raw", HOSTILE, ids=lambda raw: raw[:10])
def test_values_of_the_wrong_kind_are_shown_or_left_out(raw: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_log(map(step_record, range(5)), "good")
    for key in KEYS:
        write_log([step_record(1, train_runtime=3.0), step_record(2, **{key: "raw"}), step_record(3)], raw=raw)
        for words in COMMANDS:
            assert run(*words) == 0, (key, words, capsys.readouterr())


@pytest.mark.parametrize("raw", ["-1e308", "1" + "0" * 400, "5e-324"], ids=lambda raw: raw[:10])
def test_values_beyond_all_bounds_are_left_out_of_figures(raw: str) -> None:
    records = [step_record(step, learning_rate=1e-3) for step in range(1, 6)]
    for key in ("loss", "global_step"):
        write_log([*records, step_record(6, **{key: "raw"}), step_record(7)], raw=raw)
        options = ["--log-scale"] if key == "loss" else []
        assert run("logs", "plot", "run", "-o", "x.svg", "--loss-curves", *options) == 0, key
    norms = [{"global_step": step, "norms": {"a": 1.0, "b": "raw" if step == 2 else -1e308}} for step in range(4)]
    path = write_log(norms, raw=raw)
    for options in ([], ["--log-scale"]):
        assert run("plot", "heatmap", str(path), "-o", "x.svg", *options) == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--x-min", "nan"], "--x-min"),
        (["--y-max", "1e200"], "--y-max"),
        (["--y-min=-inf"], "--y-min"),
        (["--smooth", "-3"], "--smooth"),
    ],
)
def test_hostile_numbers_of_options_are_named(
    options: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_log(map(step_record, range(5)))
    assert run("logs", "plot", "run", "-o", "x.png", *options) == 1
    assert named in capsys.readouterr().err


def test_names_and_values_cannot_become_part_of_the_report() -> None:
    attack = "</script><script>alert(1)</script>"
    records = [step_record(step, **{f"eval_{attack}": 1.0, f"eval_\ud800{attack}_loss": 2.0}) for step in range(4)]
    path = write_log(records)
    (path.parent / "run.json").write_text(json.dumps({"config": {attack: f"\ud800{attack}"}, "status": attack}))
    assert run("logs", "report", "run", "-o", "x.html", "--title", attack) == 0
    assert "<script>alert" not in Path("x.html").read_text()
    for form in ("text", "md", "one-line"):
        assert run("logs", "summary", "run", "--format", form) == 0


def test_line_that_is_too_long_is_skipped_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log([step_record(1), step_record(2), step_record(3)])
    first, second, third, rest = path.read_text().split("\n", 1)[1].split("\n")
    path.write_text("\n".join(["[", first, second.replace("}", f', "x": "{"x" * MAX_LINE_BYTES}"}}'), third, rest]))
    log = TrainingLog.from_file(path)
    assert log.get_steps() == [1, 3]
    assert log.notes == ["Recovered 2 records; skipped lines of more than 16,777,216 bytes: 3 (at byte 76)"]
    assert run("logs", "tail", "run") == 0
    shown = capsys.readouterr()
    assert "step      3" in shown.out
    assert "1 lines of more than 16,777,216 bytes were skipped" in shown.err
    assert run("logs", "replay", "run", "--to", "csv") == 0


def test_file_of_terabytes_without_a_newline_is_read_at_once() -> None:
    path = write_log([step_record(1)])
    os.truncate(path, 1 << 42)  # sparse
    log, tail = TrainingLog.from_file(path), LogTail(path)
    assert log.get_steps() == [1]
    assert [record["global_step"] for record in tail.last(5)] == [1]
    assert (tail.news(), tail.num_long_lines) == ([], 0)


def test_file_in_another_layout_is_read_up_to_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("log.json")
    path.write_text("[" + "{}, " * 1_000_000 + "{}]")
    assert run("logs", "summary", "log.json") == 1
    assert "1,000,002 objects and lists" in (message := capsys.readouterr().err)
    assert "up to 1,000,000" in message
    path.write_text('[{"loss": 1}, ')
    os.truncate(path, (64 << 20) + 1)
    assert run("logs", "summary", "log.json") == 1
    assert "67,108,864" in capsys.readouterr().err


def test_log_with_thousands_of_keys_takes_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    write_log(step_record(step, **{f"eval_{step % 9000}": 1.0, "eval_b_loss": 1.0}) for step in range(9000))
    assert run("logs", "summary", "run") == 0
    assert run("logs", "compare", "run", "run/trainer_logs.json", "--format", "json") in (0, 1)
    assert run("logs", "plot", "run", "-o", "x.png", "--metrics", "nothing") == 1
    assert "and 8" in capsys.readouterr().err  # of the metrics, only some are listed
    for words in (["summary", "run", "--export", "x.csv"], ["replay", "run", "--to", "csv"]):
        assert run("logs", *words) == 1
        assert "9,000 rows and 9,005 columns" in capsys.readouterr().err


def test_replay_writes_a_table_of_many_layouts_once() -> None:
    write_log(step_record(step, **{f"k{step % 300}": 1.0}) for step in range(900))
    assert run("logs", "replay", "run", "--to", "csv") == 0
    with Path("runs/run/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row[f"k{step % 300}"] for step, row in enumerate(rows)] == ["1.0"] * 900


def test_keys_beyond_the_maximum_are_named(tmp_path: Path) -> None:
    path = write_log([step_record(1, **{f"k{key}": key for key in range(10_050)}), step_record(2, last=1)])
    log = TrainingLog.from_file(path)
    assert len(log.keys()) == 10_000
    assert log.records[1]["last"] == 1
    assert "more than 10,000 different keys" in log.notes[0]


@pytest.mark.parametrize("raw", [*HOSTILE, '"\\ud800\\u001b[31m"', "1e15"], ids=lambda raw: raw[:10])
def test_why_explains_decisions_of_any_values(raw: str, capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path("runs/run")
    directory.mkdir(parents=True)
    flags = ["saved", "set", "skip", "rollback", "rolled_back", "raised", "rerun_exit", "should_training_stop"]
    keys = ["timestamp", "step", "flag", "author", "event", "rank", "reason", "details"]
    lines = [
        json.dumps({"timestamp": 1.7e9, "step": 1, "flag": flag, "details": {"anomaly": 1}, key: "raw"})
        for flag in flags
        for key in keys
    ]
    (directory / "decisions.jsonl").write_text("\n".join(lines).replace('"raw"', raw))
    for status in ("stopped", raw.strip('"')):
        (directory / "run.json").write_text(json.dumps({"status": status}).replace(json.dumps(status), f'"{status}"'))
        assert run("why", "run") == 0
        assert run("why", "run", "--step", "1") == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [DEEP, '{"status": ' + "9" * 5000 + "}", "\ud800", "[1]"], ids=["deep", "long", "bytes", "list"]
)
def test_run_json_that_cannot_be_read_counts_as_missing(content: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_log([step_record(1)])
    (path.parent / "run.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert run("logs", "list", ".") == 0
    assert run("why", "run") == 0
    assert "unknown" in capsys.readouterr().out


def pipe(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [pipe, endless])
@pytest.mark.parametrize("name", ["run.json", ".run.lock", "trainer_logs.json", "decisions.jsonl"])
def test_files_that_never_end_are_not_waited_for(make: Callable[[Path], None], name: str) -> None:
    log = write_log(map(step_record, range(3)))
    (log.parent / "run.json").write_text(json.dumps({"status": "running", "config": {}}))
    (log.parent / name).unlink(missing_ok=True)
    make(log.parent / name)
    for words in (["why", "run"], ["logs", "list", "runs"], ["logs", "summary", "run"], ["logs", "replay", "run"]):
        assert run(*words) in (0, 1, 2), words


@pytest.mark.parametrize("make", [pipe, endless])
def test_a_writer_renames_a_log_that_never_ends(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "trainer_logs.json")
    writer = JsonLogWriter("trainer_logs.json")
    writer.open(tmp_path, step=3)
    writer.write_record(4, 0.0, {"loss": 1.0})
    writer.make_durable()
    writer.close()
    assert [record["global_step"] for record in read_records(tmp_path / "trainer_logs.json")] == [4]
    assert (tmp_path / "trainer_logs.unreadable-1.json").is_symlink() or make is pipe


def test_making_a_pipe_durable_does_not_wait_for_its_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe(tmp_path / "decisions.jsonl")
    assert not try_to_sync(tmp_path / "decisions.jsonl")
    assert "could not be made durable" in caplog.text
