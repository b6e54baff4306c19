"""What `onstep train` prints before anything heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onstep.cli.main import main

pytestmark = pytest.mark.process

TORCH = """
import sys
print("torch is imported", flush=True)
sys.exit(3)
"""


def printed(tmp_path: Path, *words: str, **environment: str) -> list[str]:
    """The lines of a command in a process whose torch says that it is imported, and ends the process."""
    (tmp_path / "torch.py").write_text(TORCH)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    command = [sys.executable, "-m", "onstep", *words]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, **environment}, text=True, capture_output=True
    )
    assert done.returncode == 3, done.stderr
    return done.stdout.splitlines()


def test_the_first_line_comes_before_torch_is_imported(tmp_path: Path) -> None:
    assert printed(tmp_path, "train") == [
        "tiny_gpt: 1,500 steps of 8 x 128 tokens into runs/tiny_gpt; loading PyTorch ...",
        "torch is imported",
    ]


@pytest.mark.parametrize(("words", "environment"), [(["-q"], {}), ([], {"RANK": "1"})])
def test_quiet_runs_and_other_ranks_do_not_print_it(
    tmp_path: Path, words: list[str], environment: dict[str, str]
) -> None:
    assert printed(tmp_path, "train", *words, **environment) == ["torch is imported"]


def test_a_demo_can_be_quiet_too(tmp_path: Path) -> None:
    assert printed(tmp_path, "demo", "-q") == ["torch is imported"]
    assert printed(tmp_path, "demo", "-v")[1:] == ["torch is imported"]


@pytest.mark.parametrize("command", ["train", "demo"])
def test_more_and_less_at_once_is_refused(tmp_path: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "onstep", command, "-q", "-v"], cwd=tmp_path, text=True, capture_output=True
    )
    assert (done.returncode, done.stderr) == (
        1,
        "error: -q and -v ask for less and for more output; drop one of them.\n",
    )


def test_a_value_that_does_not_exist_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(TORCH)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "onstep", "train", "logger.console=foo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        text=True,
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: logger.console='foo' must be quiet | default | verbose | bridge.\n"


def test_a_quiet_run_prints_its_end_in_one_line(
    tmp_path: Path,
    corpus: Path,
    token_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["train.train_iters=3", "model.num_layers=1", "model.hidden_size=32", "validation.eval_iters=1"]
    data = [f"dataset.paths={corpus}", f"dataset.cache_dir={token_cache}", "dist.device=cpu"]
    assert main(["train", "-q", *small, *data]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1, lines
    assert "Training complete: loss " in lines[0]
    assert (tmp_path / "runs" / "tiny_gpt" / "loss.png").exists()
