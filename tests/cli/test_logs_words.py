"""What `onstep logs` takes for a run, what it calls it, and what it says where that cannot be."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from onstep.analysis.logs.run_status import is_locked
from onstep.cli.logs.lookup import file_prefix, output_path, read_logs
from onstep.cli.main import COMMANDS, in_options, main
from onstep.errors import ConfigError
from onstep.record import MetricsLog


def made(directory: Path, num_steps: int = 3) -> Path:
    with MetricsLog.open(directory / "trainer_logs.json") as metrics_log:
        for step in range(1, num_steps + 1):
            metrics_log.append({"timestamp": 1000.0 + step, "global_step": step, "epoch": step / 10, "loss": 1 / step})
    return directory


def checkpoint(directory: Path, step: int) -> Path:
    """A checkpoint of Hugging Face's Trainer."""
    directory.mkdir(parents=True)
    history = [{"step": one, "loss": 1 / one, "epoch": one / 1000} for one in range(100, step + 1, 100)]
    (directory / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history}, indent=2))
    return directory


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the runs `new` and `old`, and nothing to open files with."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    for age, name in ((0, "new"), (100, "old")):
        made(tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "trainer_logs.json", (2000 - age, 2000 - age))
    return tmp_path


def captured(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, str]:
    code = main(list(words))
    output = capsys.readouterr()
    assert code == 0, output.err
    return output.out, output.err


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 1
    return capsys.readouterr().err


def test_checkpoints_of_hugging_face_stand_for_the_newest_log(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (500, 1000):
        checkpoint(project / f"hf/checkpoint-{step}", step)
    for words, step in (("hf", 1000), ("hf/checkpoint-500", 500)):
        out = json.loads(captured(capsys, "logs", "summary", words, "--format", "json")[0])
        assert out["total_steps"] == step
    assert "Summary of hf/checkpoint-500" in captured(capsys, "logs", "summary", "hf/checkpoint-500")[0]
    assert file_prefix(read_logs(["hf/checkpoint-500"])) == "hf_checkpoint-500_"
    made(project / "hf/runs/mine", 7)
    assert json.loads(captured(capsys, "logs", "summary", "hf", "--format", "json")[0])["total_steps"] == 7


def test_directory_without_a_log_names_both_kinds(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "empty").mkdir()
    message = refused(capsys, "logs", "summary", "empty")
    assert "trainer_logs.json" in message
    assert "checkpoint-<step>/trainer_state.json" in message


def test_log_of_hugging_face_is_replayed(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(project / "hf/checkpoint-300", 300)
    out, _ = captured(capsys, "logs", "replay", "hf", "--to", "csv", "--output", "out")
    assert out.startswith("3 records of hf/checkpoint-300/trainer_state.json sent to")
    (table,) = (project / "out").rglob("*.csv")
    assert table.read_text().count("\n") == 4


def test_a_directory_of_runs_is_all_of_them_or_the_newest_which_is_reported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [log.run_name for log in read_logs(["runs"], expand=True)] == ["new", "old"]
    assert [log.run_name for log in read_logs(["runs"])] == ["new"]
    assert capsys.readouterr().err == "runs has 2 runs; using the newest: runs/new\n"
    read_logs(["runs/old"])
    assert capsys.readouterr().err == ""


def test_a_report_of_a_directory_is_about_all_its_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert captured(capsys, "logs", "report", "runs")[0] == "comparison_report.html\n"
    page = Path("comparison_report.html").read_text()
    assert all(f'"label":"{name}"' in page for name in ("new", "old"))
    assert captured(capsys, "logs", "plot", "runs")[1] == "runs has 2 runs; using the newest: runs/new\n"
    for command, text in (
        ("report", "a directory of runs (all of them)"),
        ("plot", "a directory of runs means its newest"),
    ):
        assert text in " ".join(captured(capsys, "logs", command, "--help")[0].split())


def test_pictures_of_runs_without_a_name_do_not_overwrite_each_other(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [captured(capsys, "logs", "plot", str(made(project / name)), "--loss-curves")[0] for name in ("one", "two")]
    assert names == ["one_loss_curves.png\n", "two_loss_curves.png\n"]


def test_killed_run_is_listed_as_such(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "runs/new/run.json").write_text('{"status": "running"}')
    lock = project / "runs/new/.run.lock"
    lock.write_text(f"process 1 on {socket.gethostname()}\n")
    if is_locked(lock) is None:
        pytest.skip("this system does not list the locks of its processes")
    status = {run["run"]: run["status"] for run in json.loads(captured(capsys, "logs", "list", "--json")[0])}
    assert status == {"new": "killed", "old": None}


@pytest.mark.parametrize(
    "words",
    [
        ["plot", "new", "-o", "file/x.png"],
        ["report", "new", "-o", "file/x.html"],
        ["summary", "new", "-o", "file/x.txt"],
        ["compare", "new", "old", "-o", "file/x.txt"],
    ],
)
def test_file_that_cannot_be_written_is_reported_in_a_line(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (project / "file").touch()
    assert refused(capsys, "logs", *words).splitlines()[-1].startswith("error: file")


def refusing(**_: Any) -> None:
    """A command that the system refuses something."""
    raise PermissionError(13, "Permission denied", "/some/file")


def test_only_training_keeps_the_traceback_of_what_the_system_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onstep.cli.application.application_at", lambda _: refusing)
    for name in COMMANDS:
        if name in ("train", "finetune", "run", "launch", "fork", "rewind", "verify-resume"):
            with pytest.raises(PermissionError):
                main([name])
        else:
            assert refused(capsys, name) == "error: /some/file: Permission denied\n"


@pytest.mark.parametrize("editor", ["no-such-editor", '"unclosed'])
def test_editor_that_is_not_there_takes_no_picture_away(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, editor: str
) -> None:
    monkeypatch.setenv("EDITOR", editor)
    out, error = captured(capsys, "logs", "plot", "new", "-e", "-o", "x.svg")
    assert (out, Path("x.svg").exists()) == ("x.svg\n", True)
    assert f"The editor {editor!r} could not be started: " in error


@pytest.mark.parametrize("name", ["x.jpg", "x.v2"])
def test_unknown_suffix_is_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--output must end in one of \.png, \.svg, \.pdf, got '{name}'"):
        output_path(Path(name), None, "run")


def test_number_behind_a_dot_is_no_suffix() -> None:
    assert output_path(Path("lr-3.0e-4"), None, "run") == Path("lr-3.0e-4.png")


def test_tables_of_both_kinds_are_written_at_once(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    captured(capsys, "logs", "summary", "new", "--export", "a.csv", "--export", "b.csv")
    assert Path("a.csv").read_text() == Path("b.csv").read_text()


def test_one_label_for_one_run_may_hold_a_comma(project: Path) -> None:
    assert read_logs(["new"], ["a, b"])[0].label == "a, b"
    assert [log.label for log in read_logs(["new", "old"], ["a, b"])] == ["a", "b"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--smooth", "0"], "--smooth must be at least 1"),
        (["--y-min", "0", "--log-scale"], "--y-min must be > 0"),
        (["--x-min", "3", "--x-max", "2"], "--x-min must be below --x-max"),
    ],
)
def test_errors_name_the_options(
    project: Path, capsys: pytest.CaptureFixture[str], words: list[str], name: str
) -> None:
    assert name in refused(capsys, "logs", "plot", "new", *words)


def test_names_in_quotes_and_paths_are_no_options() -> None:
    kept = "there is no log 'x_min' in runs/y_min/trainer_logs.json or y_max.json, and no metric"
    assert in_options(kept) == kept
    assert in_options("vmin must be > 0 on a logarithmic scale, got -1.") == (
        "--vmin must be > 0 on a logarithmic scale, got -1."
    )
    assert in_options("metric must be one of norm, got 'x'.") == "--metric must be one of norm, got 'x'."


def test_binary_file_is_reported_in_one_sentence(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    assert "instead of '['; it is a binary file; pass the trainer_logs.json" in refused(
        capsys, "logs", "summary", "x.png"
    )
