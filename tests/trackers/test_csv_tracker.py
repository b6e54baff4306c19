"""The table holds each step and kind once, whatever happens to the process."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from onstep.errors import OnstepError
from onstep.trackers import CannotContinueError, make_tracker
from tests.support.hostile_trackers import identity
from tests.support.tracker_files import table


def write(directory: Path, rows: list[tuple[int, dict[str, float]]], kept: int | None = None) -> Path:
    """Open after `kept` rows, log and close; the path of the file."""
    tracker = make_tracker("csv")
    tracker.open(identity(directory), {} if kept is None else {"rows": kept})
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


def test_a_run_that_continues_drops_what_came_later(tmp_path: Path) -> None:
    write(tmp_path, [(step, {"loss": float(step)}) for step in range(1, 8)])
    path = write(tmp_path, [(5, {"loss": 50.0}), (6, {"loss": 60.0, "mfu": 0.5})], kept=4)
    assert list(table(path).loss) == [1.0, 2.0, 3.0, 4.0, 50.0, 60.0]
    assert not list(tmp_path.glob("metrics.*.csv"))


def test_a_table_of_version_0_4_keeps_the_rows_before_a_step(tmp_path: Path) -> None:
    write(tmp_path, [(step, {"loss": float(step)}) for step in range(1, 8)])
    tracker = make_tracker("csv")
    tracker.open(identity(tmp_path), {"step": 5, "samples": 20})
    assert tracker.state_dict() == {"rows": 4}
    tracker.close("completed")
    assert list(table(tmp_path / "metrics.csv").step) == [1, 2, 3, 4]


def test_a_fresh_run_moves_the_table_of_another_one_aside(tmp_path: Path) -> None:
    write(tmp_path, [(1, {"loss": 1.0})])
    write(tmp_path, [(1, {"loss": 2.0})])
    path = write(tmp_path, [(1, {"loss": 3.0})])
    kept = [table(tmp_path / f"metrics.{number}.csv").loss[0] for number in (1, 2)]
    assert (list(table(path).loss), kept) == ([3.0], [1.0, 2.0])


@pytest.mark.parametrize("cut", range(0, 28, 3))
def test_a_line_that_a_kill_cut_short_is_left_out(cut: int, tmp_path: Path) -> None:
    path = write(tmp_path, [(1, {"loss": 1.0}), (2, {"loss": 2.0})])
    path.write_bytes(path.read_bytes() + b"12,train,1003.0,3.2512345678\n"[:cut])
    assert list(table(write(tmp_path, [(3, {"loss": 30.0})], kept=2)).loss) == [1.0, 2.0, 30.0]


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


@pytest.mark.parametrize("text", ["name,value\na,1\n", "step,kind,timestamp\n1,train,1.0\n", "\x00\x01\n"])
def test_a_file_that_is_something_else_is_kept_aside(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    with pytest.raises(CannotContinueError):
        write(tmp_path, [], kept=4)
    assert (tmp_path / "metrics.1.csv").read_text() == text
    assert "It was renamed to" in caplog.text


def test_names_that_need_quotes_stay_one_column(tmp_path: Path) -> None:
    names = {'a,b "c"\nd': 1.0, "loss": 2.0}
    write(tmp_path, [(1, names)])
    found = table(write(tmp_path, [(2, names)], kept=1))
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
