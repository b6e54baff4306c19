"""The scripts of the pages for TRL and sentence-transformers: `onstep run` gives the losses of `python`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.docs.pages import ROOT, blocks

pytestmark = pytest.mark.process

PAGES = {
    "trl": ("trl", "train_sft.py", "out/sums"),
    "sentence-transformers": ("sentence_transformers", "train_pairs.py", "out/pairs"),
}
TIMED = (
    "runtime",
    "per_second",
    "per_sec",
    "total_flos",
    "model_preparation_time",
    "step_time",
    "grad_norm",
    "train_loss",
    "num_tokens",
)


@pytest.fixture(params=PAGES)
def page(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[list[Path], str, str]:
    """Two directories with the page's script, its name, and its output directory."""
    package, script, output = PAGES[request.param]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    text = ROOT / "docs" / "coming-from" / f"{request.param}.md"
    [code] = [block.code for block in blocks(text, "python")]
    assert f"onstep run {script}\n" in [block.code for block in blocks(text, "bash")]
    directories = [tmp_path / name for name in ("one", "other")]
    for directory in directories:
        directory.mkdir()
        (directory / script).write_text(code)
    return directories, script, output


def start(words: list[str], directory: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    with (directory / "said.txt").open("w") as said:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=said, stderr=said, text=True)


def finish(words: list[str], directory: Path) -> None:
    with start(words, directory) as process:
        code = process.wait(240)
    assert code == 0, (directory / "said.txt").read_text()[-4000:]


def numbers(directory: Path, output: str) -> list[dict[str, float]]:
    """The records of the last checkpoint, without what depends on the machine or is measured otherwise."""
    checkpoints = sorted((directory / output).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history: list[dict[str, Any]] = json.loads((checkpoints[-1] / "trainer_state.json").read_text())["log_history"]
    return [{k: v for k, v in one.items() if not k.endswith(TIMED)} for one in history if "train_runtime" not in one]


@pytest.mark.slow
def test_the_script_learns_under_onstep(page: tuple[list[Path], str, str]) -> None:
    [_, ours], script, output = page
    finish(["-m", "onstep.run", script], ours)
    assert json.loads((ours / output / "run.json").read_text())["status"] == "completed"
    losses = [one["loss"] for one in numbers(ours, output) if "loss" in one]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.slow
def test_the_script_gives_the_losses_of_python(page: tuple[list[Path], str, str]) -> None:
    [theirs, ours], script, output = page
    finish([script], theirs)
    finish(["-m", "onstep.run", script], ours)
    pairs = list(zip(numbers(theirs, output), numbers(ours, output), strict=True))
    assert len(pairs) >= 6
    for one, other in pairs:
        shared = one.keys() & other.keys()
        assert {"loss"} <= shared or any(name.startswith("eval") for name in shared)
        assert {name: other[name] for name in shared} == pytest.approx({k: one[k] for k in shared}, abs=1e-6)


@pytest.mark.slow
def test_the_script_continues_after_a_kill_to_the_same_bits(page: tuple[list[Path], str, str]) -> None:
    [whole, killed], script, output = page
    words = ["-m", "onstep.run", script]
    finish(words, whole)
    with start(words, killed) as process:
        while process.poll() is None and not list((killed / output).glob("checkpoint-*/manifest.json")):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finish(words, killed)
    one, other = (load_file(directory / output / "model.safetensors") for directory in (whole, killed))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert numbers(whole, output) == numbers(killed, output)
