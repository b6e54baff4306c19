"""torchrun restarts the ranks of a Trainer, which continue their own run and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import torchrun

pytestmark = [pytest.mark.process, pytest.mark.distributed]
SCRIPT = ["-m", "tests.support.scripts.trainer_restart"]
ROOT = str(Path(__file__).parents[2])


def start(directory: Path, *words: str) -> str:
    options = ("--max-restarts=1",)
    code, said = torchrun.finish([*SCRIPT, *words], directory, options=options, PYTHONPATH=f"{ROOT}/src:{ROOT}")
    assert code == 0, said
    return said


def begins(directory: Path) -> list[list[str]]:
    return [(directory / f"begins-{rank}.txt").read_text().split() for rank in range(2)]


@pytest.mark.slow
def test_a_restart_continues_the_run_and_the_next_launch_does_not(tmp_path: Path) -> None:
    start(tmp_path, "kill", "new")
    assert begins(tmp_path) == [["0", "4"], ["0", "4"]]
    said = start(tmp_path, "flips")
    assert begins(tmp_path) == [["0", "4", "0"], ["0", "4", "0"]]
    assert said.count("Training starts from scratch") == 1
    assert (tmp_path / "run" / "checkpoints-1" / "checkpoint-8").is_dir()
