"""`onstep logs replay` fills a tracker from a run's metrics log and says where."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from onstep.cli.logs.replay import replay
from onstep.errors import ConfigError, OnstepError
from onstep.record import MetricsLog
from tests.support.tracker_files import scalars, table

app = typer.Typer()
app.command()(replay)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A metrics log of 5 steps in runs/mine, seen from above runs/."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "mine"
    with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
        for step in range(1, 6):
            metrics_log.append({"timestamp": 1.0, "global_step": step, "epoch": 0.1, "loss": 1.0 / step})
    return directory


@pytest.mark.parametrize("words", ["mine", "runs/mine", "runs/mine/trainer_logs.json"])
def test_a_run_is_given_as_name_directory_or_metrics_log(words: str, run: Path) -> None:
    result = CliRunner().invoke(app, [words, "--to", "csv"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "5 records of" in result.output
    assert "metrics.csv" in result.output
    assert list(table(run / "metrics.csv").step) == [1, 2, 3, 4, 5]


def test_local_files_go_where_they_are_wanted(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["mine", "--to", "tensorboard", "--output", "elsewhere"], catch_exceptions=False)
    assert str(Path("elsewhere") / "tensorboard") in result.output
    assert len(scalars(tmp_path / "elsewhere" / "tensorboard")["train/loss"]) == 5
    assert not (run / "tensorboard").exists()


@pytest.mark.parametrize(
    ("words", "to", "message"),
    [("mine", "tensorbord", "Did you mean 'tensorboard'"), ("yours", "csv", "there is no log 'yours'.*mine")],
)
def test_what_is_not_there_is_named(words: str, to: str, message: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        replay(words, to)


def test_a_tracker_that_fails_says_so(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OnstepError, match=r"cannot send to the tracker 'csv': .*Error"):
        replay("mine", "csv", tmp_path / "file" / "below")


@pytest.mark.parametrize("lock", [".run.lock", "trainer_logs.json"])
def test_the_files_of_a_live_run_are_left_alone(lock: str, run: Path, tmp_path: Path) -> None:
    (run / "metrics.csv").write_text("the run's own")
    holder = (run / lock).open("a")
    fcntl.flock(holder, fcntl.LOCK_EX)
    for to in ("csv", "tensorboard"):
        for output in (None, Path("runs") / "mine"):
            with pytest.raises(ConfigError, match=r"is a live run.*--output DIR"):
                replay("mine", to, output)
    assert not (run / "tensorboard").exists()
    replay("mine", "csv", tmp_path / "elsewhere")
    assert len(table(tmp_path / "elsewhere" / "metrics.csv")) == 5
    holder.close()
    replay("mine", "csv")
    assert (run / "metrics.1.csv").read_text() == "the run's own"
