"""`onstep logs plot|compare|report` and `onstep plot heatmap` on metrics logs of real and of killed runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from onstep import pretrain
from onstep.analysis import TrainingLog
from onstep.callbacks import JsonLogger
from onstep.cli.main import main
from onstep.config import ConfigContainer
from onstep.record import MetricsLog
from tests.support.waiting import until

WRITER = """
import sys
from onstep.record import MetricsLog
with MetricsLog.open(sys.argv[1]) as metrics_log:
    for step in range(1, 10**9):
        metrics_log.append({"timestamp": 1000.0 + step, "global_step": step, "epoch": step / 1e3, "loss": 5 / step})
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two finished runs, and nothing to open files with."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for age, (name, rate) in enumerate((("fast", 0.5), ("slow", 0.1))):
        with MetricsLog.open(tmp_path / "runs" / name / "trainer_logs.json") as metrics_log:
            for step in range(1, 61):
                place = {"timestamp": 1000.0 + 60 * step, "global_step": step, "epoch": step / 60}
                metrics_log.append({**place, "loss": 1 + rate / step, "grad_norm": 1.0, "learning_rate": rate})
                if step % 20 == 0:
                    metrics_log.append({**place, "eval_loss": 1.1 + rate / step})
        record = {"status": "completed", "config": {"optimizer": {"lr": rate}, "train": {"train_iters": 60}}}
        (tmp_path / "runs" / name / "run.json").write_text(json.dumps(record))
        os.utime(tmp_path / "runs" / name / "trainer_logs.json", (2000 - age, 2000 - age))
    return tmp_path


def onstep(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints that does its work."""
    code = main(list(words))
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out.strip()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that does nothing."""
    assert main(list(words)) != 0
    return capsys.readouterr().err


def texts(path: str | Path) -> list[str]:
    """The texts of an SVG; matplotlib leaves each in a comment."""
    source = Path(path).read_text()
    return [part.split("-->")[0].strip() for part in source.split("<!--")[1:]]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "fast_training_plot.png"),
        (["--loss-curves"], "fast_loss_curves.png"),
        (["--grad-norm", "--format", "svg"], "fast_grad_norm.svg"),
        (["--metrics", "loss,learning_rate"], "fast_plot_loss_learning_rate.png"),
        (["slow", "fast"], "comparison_training_plot.png"),
    ],
)
def test_plot_writes_a_picture_and_prints_where(
    project: Path, capsys: pytest.CaptureFixture[str], options: list[str], name: str
) -> None:
    assert onstep(capsys, "logs", "plot", *options) == f"{name}"
    assert (project / name).stat().st_size > 1000


def test_every_option_of_plot_reaches_the_picture(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--loss-curves", "--x-axis", "time", "--smooth", "5", "--log-scale", "--title", "My title"]
    options += ["--labels", "one,two", "--perplexity", "--ignore-outliers", "--no-show", "-o", "out/figure.svg"]
    bounds = ["--x-min", "10", "--x-max", "50", "--y-min", "1", "--y-max", "9"]
    assert onstep(capsys, "logs", "plot", "runs/fast", "--compare", "slow", *options, *bounds) == "out/figure.svg"
    found = texts("out/figure.svg")
    for text in ("My title", "one", "two", "time (minutes)", "training perplexity", "validation perplexity", "40"):
        assert text in found, found
    assert "60" not in found


def test_labels_may_hold_commas_where_each_is_given_alone(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["logs", "plot", "fast", "slow", "--labels", "a, b", "--labels", "c", "-o", "x.svg"]
    assert {"a, b", "c"} <= set(texts(onstep(capsys, *words)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["fats"], "Did you mean 'fast'?"),
        (["fast", "--metrics", "los"], "Did you mean 'loss'?"),
        (["fast", "slow", "--metrics", "loss,los"], "Did you mean 'loss'? Available: loss, grad_norm"),
        (["fast", "--x-min", "61"], "there are no points with --x-min=61; the x axis (step) ranges from 1 to 60"),
        (["fast", "--metrics", ","], "--metrics must name at least one key"),
        (["fast", "--x-axis", "day"], "Invalid --x-axis: 'day'"),
        (["fast", "--x-axis", "tokens"], "choose another x axis: step, epoch, time"),
        (["fast", "--loss-curves", "--grad-norm"], "choose one of them"),
        (["fast", "--metrics", "loss", "--grad-norm"], "choose one of them"),
        (["fast", "--grad-norm", "--perplexity"], "--perplexity applies to loss plots only"),
        (["fast", "slow", "--labels", "a,b,c"], "--labels must name each of the 2 runs, got 3"),
        (["fast", "--compare"], "--compare requires at least two runs"),
        (["fast", "--format", "gif"], "--format must be one of png, svg, pdf"),
        (["fast", "-o", "x.png", "--format", "svg"], "conflict; drop one of them"),
    ],
)
def test_plot_refuses_what_cannot_be(
    project: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert message in refused(capsys, "logs", "plot", *options)
    assert not list(project.rglob("*.png"))


def test_runs_in_the_order_of_the_alphabet_are_sorted_by_their_numbers(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("lr10", "lr2"):
        (project / "runs" / name).mkdir()
        (project / "runs" / name / "trainer_logs.json").write_text('[{"global_step": 1, "loss": 2.0}]')
    found = texts(onstep(capsys, "logs", "plot", "lr10", "lr2", "-o", "x.svg"))
    assert found.index("lr2") < found.index("lr10")
    assert "validation loss" not in found
    chosen = texts(onstep(capsys, "logs", "plot", "slow", "fast", "-o", "y.svg"))
    assert chosen.index("slow") < chosen.index("fast")


def test_an_output_without_a_suffix_gets_that_of_the_format(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert onstep(capsys, "logs", "plot", "fast", "-o", "lr-0.5") == "lr-0.5.png"
    assert onstep(capsys, "logs", "plot", "fast", "-o", "x", "--format", "pdf") == "x.pdf"


def test_a_picture_can_be_opened_in_an_editor(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    editor = "import pathlib, sys; pathlib.Path('opened').write_text(sys.argv[1])"
    monkeypatch.setenv("EDITOR", f'{sys.executable} -c "{editor}"')
    onstep(capsys, "logs", "plot", "fast", "-e")
    assert (project / "opened").read_text() == "fast_training_plot.png"


def test_compare_prints_numbers_and_differences(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = onstep(capsys, "logs", "compare", "fast", "slow").splitlines()
    assert lines[0].split() == ["fast", "slow"]
    assert any(line.split() == ["optimizer.lr", "0.5", "0.1"] for line in lines)
    assert not any("train_iters" in line for line in lines)


def test_compare_takes_a_directory_of_runs_and_writes_files(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert onstep(capsys, "logs", "compare", "runs", "--format", "json", "-o", "new/runs.json") == "new/runs.json"
    assert [run["label"] for run in json.loads(Path("new/runs.json").read_text())["runs"]] == ["fast", "slow"]
    assert onstep(capsys, "logs", "compare", "runs", "--format", "md").startswith("# Comparison of runs")
    assert "at least two runs" in refused(capsys, "logs", "compare", "fast")
    assert "at least two runs" in refused(capsys, "logs", "compare", "fast", "runs/fast")
    assert "format must be one of text, md, json" in refused(capsys, "logs", "compare", "runs", "--format", "xml")


def test_report_writes_a_page(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert onstep(capsys, "logs", "report") == "fast_report.html"
    words = ["logs", "report", "fast", "slow", "--title", "Both", "--labels", "A,B", "-o", "both.html"]
    assert onstep(capsys, *words) == "both.html"
    page = Path("both.html").read_text()
    assert "<h1>Both</h1>" in page
    assert '"label":"B"' in page


def test_a_run_that_was_killed_while_it_wrote_is_plotted_compared_and_reported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project / "runs" / "killed" / "trainer_logs.json"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    try:
        until(lambda: path.exists() and path.stat().st_size >= 20_000, while_true=lambda: process.poll() is None)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    path.write_bytes(path.read_bytes()[:-20])
    steps = TrainingLog.from_file(path).num_records
    assert onstep(capsys, "logs", "plot", "--loss-curves").endswith("killed_loss_curves.png")
    compared = json.loads(onstep(capsys, "logs", "compare", "killed", "fast", "--format", "json"))
    assert compared["metrics"]["steps"]["values"] == [steps, 60]
    assert onstep(capsys, "logs", "report", "killed").endswith("killed_report.html")


def test_files_that_are_no_logs_are_refused(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prose.json").write_text("prose")
    Path("picture.png").write_bytes(b"\x89PNG\xff\xfe")
    for name in ("prose.json", "picture.png"):
        assert name in refused(capsys, "logs", "plot", name)


def test_a_real_run_is_plotted_over_its_tokens(
    project: Path, tiny_config: ConfigContainer, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.run.name, tiny_config.logger.log_interval = "real", 1
    pretrain(tiny_config, callbacks=[JsonLogger()])
    capsys.readouterr()
    words = ["logs", "plot", "real", "--loss-curves", "--x-axis", "tokens", "-o", "real.svg"]
    assert {"tokens", "training loss", "validation loss", "learning rate"} <= set(texts(onstep(capsys, *words)))
    differing = json.loads(onstep(capsys, "logs", "compare", "real", "fast", "--format", "json"))["differences"]
    assert differing["optimizer.lr"] == [tiny_config.optimizer.lr, 0.5]


def diagnostics(project: Path, run: str, name: str, key: str, age: float, **norms: float) -> Path:
    records: list[dict[str, Any]] = [{"global_step": step, key: {**norms, "b": 1.0}} for step in (1, 2)]
    path = project / "runs" / run / name
    path.write_text(json.dumps(records))
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_heatmap_takes_the_newest_file_whatever_its_name(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnostics(project, "slow", "parameter_norms.json", "norms", age=50)
    diagnostics(project, "fast", "gradient_norms.json", "grad_norms", age=10)
    diagnostics(project, "fast", "parameter_norms.json", "norms", age=90)
    assert onstep(capsys, "plot", "heatmap") == "fast_heatmap_gradient_norms.png"
    assert onstep(capsys, "plot", "heatmap", "slow") == "slow_heatmap_parameter_norms.png"
    assert onstep(capsys, "plot", "heatmap", "runs/fast") == "fast_heatmap_gradient_norms.png"


def test_heatmap_of_a_metric_takes_the_file_that_has_it(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diagnostics(project, "fast", "gradient_norms.json", "grad_norms", age=50)
    diagnostics(project, "fast", "parameter_norms.json", "norms", age=10)
    diagnostics(project, "slow", "parameter_norms.json", "norms", age=5)
    for words in (["fast"], []):
        found = onstep(capsys, "plot", "heatmap", *words, "--metric", "grad_norm")
        assert found == "fast_heatmap_gradient_norms_grad_norm.png"
    message = refused(capsys, "plot", "heatmap", "slow", "--metric", "grad_norm")
    assert "slow has no gradient_norms.json; train with the callback GradNormLogger" in message


def test_every_option_of_heatmap_reaches_the_picture(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = diagnostics(project, "fast", "parameter_norms.json", "norms", age=0, **{"layers.0": 2.0, "layers.1": 3.0})
    options = ["--metric", "norm", "-f", r"layers\.", "--step-stride", "2", "--title", "Norms", "--log-scale"]
    options += ["--vmin", "1", "--vmax", "10", "--figsize", "4", "3", "--format", "svg"]
    target = onstep(capsys, "plot", "heatmap", str(path), *options)
    assert target == "fast_heatmap_parameter_norms_norm.svg"
    found = texts(target)
    assert {"Norms", "layers.0", "layers.1", "parameter norm"} <= set(found)
    assert "b" not in found


def test_heatmap_says_what_is_missing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["fast"]):
        message = refused(capsys, "plot", "heatmap", *words)
        assert "ParameterNormLogger or GradNormLogger" in message
    assert "no file or run 'fats'" in refused(capsys, "plot", "heatmap", "fats")


@pytest.mark.parametrize("words", [["fast", "slow"], ["--smooth", "3", "fast"]])
def test_plot_of_runs_names_the_command_that_draws_them(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert f"; write onstep logs plot {' '.join(words)}" in refused(capsys, "plot", *words)
