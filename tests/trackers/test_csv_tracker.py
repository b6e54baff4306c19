"""The table holds each step and kind once, whatever happens to the process."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from onstep.errors import OnstepError
from onstep.trackers import Point, make_tracker
from onstep.trackers.services import csv_tracker
from tests.support.hostile_trackers import identity
from tests.support.tracker_files import table


def write(directory: Path, rows: list[tuple[int, dict[str, float]]], **run: Any) -> Path:
    """Open, log and close; the path of the file."""
    tracker = make_tracker("csv")
    tracker.open(identity(directory, **run), {})
    for step, metrics in rows:
        tracker.log(metrics, step, 1000.0 + step)
    tracker.close("completed")
    return directory / "metrics.csv"


def test_a_row_holds_the_metrics_logs_names(tmp_path: Path) -> None:
    path = write(tmp_path, [(1, {"loss": 2.5, "epoch": 0.5, "tokens": 128}), (1, {"eval_loss": 2.25, "epoch": 0.5})])
    assert path.read_text() == (
        "step,kind,timestamp,epoch,loss,tokens,eval_loss\n1,train,1001.0,0.5,2.5,128,\n1,eval,1001.0,0.5,,,2.25\n"
    )


def test_a_column_that_appears_later_is_empty_before(tmp_path: Path) -> None:
    rows = [(1, {"loss": 1.0}), (2, {"loss": 2.0, "tok_per_sec": 5}), (3, {"loss": 3.0, "tok_per_sec": 6})]
    found = table(write(tmp_path, rows))
    assert list(found.loss) == [1.0, 2.0, 3.0]
    assert list(found.tok_per_sec)[1:] == [5.0, 6.0]
    assert math.isnan(found.tok_per_sec[0])
    assert {line.count(",") for line in (tmp_path / "metrics.csv").read_text().splitlines()} == {4}


def test_nan_and_infinities_are_read_by_pandas(tmp_path: Path) -> None:
    rows = [(1, {"loss": math.nan, "norm": math.inf}), (2, {"loss": 1.0, "norm": -math.inf})]
    found = table(write(tmp_path, rows))
    assert math.isnan(found.loss[0])
    assert list(found.norm) == [math.inf, -math.inf]
    assert found.dtypes["loss"] == found.dtypes["norm"] == "float64"


def test_what_is_reported_at_a_step_again_joins_its_row(tmp_path: Path) -> None:
    rows = [(1, {"loss": 3.0}), (2, {"loss": 2.0}), (2, {"eval_loss": 1.5}), (2, {"train_runtime": 9.0, "loss": 0.5})]
    found = table(write(tmp_path, [*rows, (2, {"loss": 1.0}), (2, {"eval_loss": 0.75})]))
    assert list(found.eval_loss)[2] == 0.75
    assert list(zip(found.step, found.kind, strict=True)) == [(1, "train"), (2, "train"), (2, "eval")]
    assert (found.loss[1], found.train_runtime[1]) == (1.0, 9.0)


def test_a_run_that_continues_drops_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, [(step, {"loss": float(step)}) for step in range(1, 8)])
    last = (Point({"loss": 4.0}, 4, 1004.0), Point({"eval_loss": 0.5}, 4, 1004.5))
    path = write(tmp_path, [(5, {"loss": 50.0}), (6, {"loss": 60.0})], start_step=4, last_points=last)
    found = table(path)
    assert list(found.loss.dropna()) == [1.0, 2.0, 3.0, 4.0, 50.0, 60.0]
    assert list(found[found.kind == "eval"].eval_loss) == [0.5]
    assert not list(tmp_path.glob("metrics.*.csv"))


def test_a_record_made_after_the_checkpoint_at_its_step_does_not_stay(tmp_path: Path) -> None:
    write(tmp_path, [(4, {"loss": 4.0}), (4, {"eval_loss": 9.0})])
    path = write(tmp_path, [], start_step=4, last_points=(Point({"loss": 4.0}, 4, 1004.0),))
    assert list(table(path).kind) == ["train"]


def test_a_run_without_its_last_points_keeps_the_checkpoints_step(tmp_path: Path) -> None:
    write(tmp_path, [(step, {"loss": float(step)}) for step in range(1, 8)])
    found = table(write(tmp_path, [(5, {"loss": 50.0})], start_step=4))
    assert list(found.step) == [1, 2, 3, 4, 5]


def test_a_fresh_run_moves_the_table_of_another_one_aside(tmp_path: Path) -> None:
    write(tmp_path, [(1, {"loss": 1.0})])
    write(tmp_path, [(1, {"loss": 2.0})])
    path = write(tmp_path, [(1, {"loss": 3.0})])
    kept = [table(tmp_path / f"metrics.{number}.csv").loss[0] for number in (1, 2)]
    assert (list(table(path).loss), kept) == ([3.0], [1.0, 2.0])


def test_an_evaluation_outside_of_training_only_adds(tmp_path: Path) -> None:
    write(tmp_path, [(1, {"loss": 1.0}), (9, {"loss": 9.0})])
    path = write(tmp_path, [(9, {"eval_loss": 0.5})], adds_only=True)
    assert list(table(path).kind) == ["train", "train", "eval"]


@pytest.mark.parametrize("adds_only", [False, True])
@pytest.mark.parametrize("cut", range(0, 28, 3))
def test_a_line_that_a_kill_cut_short_is_left_out(cut: int, adds_only: bool, tmp_path: Path) -> None:
    path = write(tmp_path, [(1, {"loss": 1.0}), (2, {"loss": 2.0})])
    path.write_bytes(path.read_bytes() + b"12,train,1003.0,3.2512345678\n"[:cut])
    last = () if adds_only else (Point({"loss": 2.0}, 2, 1002.0),)
    again = write(tmp_path, [(3, {"loss": 30.0})], start_step=2, last_points=last, adds_only=adds_only)
    assert list(table(again).step) == [1, 2, 3]
    assert list(table(again).loss) == [1.0, 2.0, 30.0]


def test_a_reader_never_meets_a_table_without_its_rows(tmp_path: Path) -> None:
    """A new column and a merge replace the file: whoever has the old one open still reads all of it."""
    tracker = make_tracker("csv")
    tracker.open(identity(tmp_path), {})
    tracker.log({"loss": 1.0}, 1, 0.0)
    with (tmp_path / "metrics.csv").open() as before:
        tracker.log({"loss": 2.0, "mfu": 0.5}, 2, 0.0)
        assert before.read() == "step,kind,timestamp,loss\n1,train,0.0,1.0\n"
    tracker.close("completed")
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("text", ["name,value\na,1\n", "step,kind,timestamp\nfirst,train,1.0\n", "\x00\x01\n"])
def test_a_file_that_is_something_else_is_kept_aside(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    path = write(tmp_path, [(5, {"loss": 5.0})], start_step=4)
    assert list(table(path).loss) == [5.0]
    assert (tmp_path / "metrics.1.csv").read_text() == text
    assert "is not a table of metrics" in caplog.text


def test_names_that_need_quotes_stay_one_column(tmp_path: Path) -> None:
    names = {'a,b "c"\nd': 1.0, "loss": 2.0}
    write(tmp_path, [(1, names)])
    found = table(write(tmp_path, [(2, names)], start_step=1))
    assert list(found.columns)[3:] == ['a,b "c" d', "loss"]
    assert list(found.loss) == [2.0, 2.0]


def test_a_table_that_was_replaced_under_the_run_is_said_so(tmp_path: Path) -> None:
    tracker = make_tracker("csv")
    tracker.open(identity(tmp_path), {})
    for step in range(1, 5):
        tracker.log({"loss": 1.0}, step, 0.0)
    for content, new_name in (("step,kind,timestamp,loss\n", "late"), ("", "later")):
        (tmp_path / "other.csv").write_text(content)
        (tmp_path / "other.csv").rename(tmp_path / "metrics.csv")
        with pytest.raises(OnstepError, match="another writer has replaced it"):
            tracker.log({new_name: 1.0}, 5, 0.0)
    tracker.close("completed")


def long_table(directory: Path, monkeypatch: pytest.MonkeyPatch, num_steps: int = 40) -> dict[str, Any]:
    """Write a table with a mark about every 8 rows; the state of the tracker after `num_steps`, at its checkpoint."""
    monkeypatch.setattr(csv_tracker, "MARK_ROWS", 8)
    tracker = make_tracker("csv")
    tracker.open(identity(directory), {})
    for step in range(1, num_steps + 6):
        tracker.log({"loss": float(step), "epoch": step / 100}, step, 1000.0 + step)
        if step % 10 == 0:
            tracker.log({"eval_loss": 0.5}, step, 1000.5 + step)
        if step == num_steps:
            state: dict[str, Any] = json.loads(json.dumps(tracker.state_dict()))
    tracker.close("completed")
    return state


def continued(directory: Path, state: dict[str, Any], step: int) -> str:
    """The table after a run that continues at `step` and adds a step."""
    tracker = make_tracker("csv")
    last = (
        Point({"loss": float(step), "epoch": step / 100}, step, 1000.0 + step),
        Point({"eval_loss": 0.5}, step, 1040.5),
    )
    tracker.open(identity(directory, start_step=step, last_points=last), state)
    tracker.log({"loss": 0.25, "epoch": 1.0}, step + 1, 2000.0)
    tracker.close("completed")
    return (directory / "metrics.csv").read_text()


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    rows: list[str] = []
    real = csv_tracker.CsvTable._row

    def noted(table: csv_tracker.CsvTable, line: str) -> dict[str, str]:
        rows.append(line)
        return real(table, line)

    monkeypatch.setattr(csv_tracker.CsvTable, "_row", noted)
    return rows


@pytest.mark.parametrize("number", [40, 400])
def test_a_long_table_is_continued_at_its_end(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows_read: list[str]
) -> None:
    state = long_table(tmp_path, monkeypatch, number)
    text = continued(tmp_path, state, number)
    assert [int(line.split(",")[0]) for line in text.splitlines()[-4:]] == [number - 1, number, number, number + 1]
    assert 0 < len(rows_read) <= 30, "the rows after the older mark at most, and those after the checkpoint"


DAMAGE = {
    "as it was": lambda text: text,
    "a line cut short": lambda text: text + "46,tr",
    "another row before the mark": lambda text: text.replace("\n25,train,1025.0", "\n25,train,1025.5"),
    "shorter": lambda text: text[: len(text) // 2],
    "an earlier step at the end": lambda text: text + "3,test,1.0,0.5,0.5,\n",
    "a row that repeats": lambda text: text + text.splitlines(keepends=True)[-1],
    "a repeated kept row": lambda text: text.replace("\n39,train", "\n39,train,1.0,0.5,1.0,\n39,train"),
    "another column": lambda text: text.replace("loss,", "loss,extra,", 1),
    "no rows": lambda text: text.partition("\n")[0] + "\n",
}


@pytest.mark.parametrize("step", [40, 30, 5])
@pytest.mark.parametrize("case", DAMAGE)
def test_a_table_is_left_as_by_reading_all_of_it(
    case: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = long_table(tmp_path, monkeypatch)
    path, found = tmp_path / "metrics.csv", []
    content = DAMAGE[case](path.read_text())
    for one in (state, {}):
        path.write_text(content)
        found.append(continued(tmp_path, one, step))
    assert state["marks"]
    assert found[0] == found[1]


@pytest.mark.parametrize("marks", [7, [7], [[1, 2]], [[40, -3, "x"]], [[40, 10**30, "x"]], [[40, 2**62, None]], {}])
def test_marks_that_are_none_lead_to_reading_all(marks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = long_table(tmp_path, monkeypatch)
    expected = continued(tmp_path, state, 40)
    assert continued(tmp_path, {"marks": marks}, 40) == expected


def test_a_new_column_moves_all_rows_so_marks_before_it_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_table(tmp_path, monkeypatch)
    tracker = make_tracker("csv")
    tracker.open(identity(tmp_path, start_step=45), long_table(tmp_path, monkeypatch))
    assert tracker.state_dict()
    tracker.log({"loss": 1.0, "mfu": 0.5}, 46, 0.0)
    assert tracker.state_dict() == {}
    tracker.close("completed")
