"""The picture of a run's loss: it is made, and it shows what the metrics log holds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from onstep.analysis import plot_loss
from onstep.errors import DataError
from onstep.record import MetricsLog


def metrics_log(path: Path, records: list[dict[str, object]]) -> Path:
    with MetricsLog.open(path) as opened:
        for record in records:
            opened.append(record)
    return path


def svg_text(path: Path) -> str:
    """The picture's source; matplotlib leaves each text in a comment."""
    return path.read_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny-gpt"
    header: list[dict[str, object]] = [{"global_step": 0, "experiment_info": {"loss": "cross entropy"}}]
    steps: list[dict[str, object]] = [{"global_step": s, "loss": 5.0 / s} for s in range(1, 60)]
    evaluations: list[dict[str, object]] = [{"global_step": s, "eval_loss": 6.0 / s} for s in (20, 40)]
    return metrics_log(directory / "trainer_logs.json", [*header, *steps, *evaluations, {"train_runtime": 1.0}])


def test_png_is_written_where_asked(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "pictures" / "loss.png"
    assert plot_loss(run, output) == output
    assert output.read_bytes().startswith(b"\x89PNG")
    assert plot_loss(str(run), str(tmp_path / "loss.pdf")) == tmp_path / "loss.pdf"


def test_picture_names_run_losses_and_axes(run: Path, tmp_path: Path) -> None:
    text = svg_text(plot_loss(run, tmp_path / "loss.svg"))
    for words in ("Loss of tiny-gpt", "training loss (last 0.0847)", "validation loss (last 0.1500)", "<!-- step -->"):
        assert words in text, words


@pytest.mark.parametrize("key", ["loss", "eval_loss"])
def test_one_kind_of_loss_is_enough(tmp_path: Path, key: str) -> None:
    path = metrics_log(tmp_path / "log.json", [{"global_step": 1, key: 1.0}])
    text = svg_text(plot_loss(path, tmp_path / "loss.svg"))
    assert ("training" in text) is (key == "loss")
    assert ("validation" in text) is (key == "eval_loss")


def test_losses_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    losses = [1.0, math.nan, math.inf, 0.5, math.nan]
    path = metrics_log(tmp_path / "log.json", [{"global_step": s, "loss": loss} for s, loss in enumerate(losses)])
    assert "training loss (last 0.5000)" in svg_text(plot_loss(path, tmp_path / "loss.svg"))
    path = metrics_log(tmp_path / "nan.json", [{"global_step": 1, "loss": math.nan}])
    assert "not finite" in svg_text(plot_loss(path, tmp_path / "nan.svg"))


def test_metrics_log_of_a_killed_run_can_be_drawn(run: Path, tmp_path: Path) -> None:
    run.write_bytes(run.read_bytes()[:-30])
    assert plot_loss(run, tmp_path / "loss.png").exists()


def test_errors_say_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        plot_loss(tmp_path / "none.json", tmp_path / "loss.png")
    with pytest.raises(DataError, match="no record with 'loss' or 'eval_loss'"):
        plot_loss(metrics_log(tmp_path / "empty.json", []), tmp_path / "loss.png")
    (tmp_path / "prose.json").write_text("prose")
    with pytest.raises(DataError):
        plot_loss(tmp_path / "prose.json", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()
