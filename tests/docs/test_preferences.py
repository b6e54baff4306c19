"""The recipes and pages for DPO, KTO, reward models and GRPO: they train as under transformers, and survive kills."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.docs.pages import ROOT, blocks
from tests.docs.test_pages_of_libraries import finish, numbers, start

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,  # make brought starts them
    pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="trl is not installed: make brought"),
]

KINDS = {"dpo": "dpo", "kto": "kto", "reward": "reward-models", "grpo": "grpo"}
"""Pages, by recipe."""
LINE = "import onstep.as_transformers"
TRIED = "--learning_rate 3e-3 --logging_steps 1 --save_steps 3 --num_train_epochs 2"


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the recipes, with the tiny model and its data."""
    directory = tmp_path_factory.mktemp("tried") / "recipes"
    shutil.copytree(ROOT / "examples" / "preferences", directory)
    finish(["tiny_chat.py"], directory)
    return directory


@pytest.fixture
def twice(tried: Path, tmp_path: Path) -> list[Path]:
    """Two copies of that directory."""
    return [Path(shutil.copytree(tried, tmp_path / name)) for name in ("one", "other")]


def command(kind: str) -> list[str]:
    """The words of the page's recipe, with arguments that make checkpoints of a short training."""
    page = ROOT / "docs" / "guide" / f"{KINDS[kind]}.md"
    [line] = [block.code.strip() for block in blocks(page, "bash") if f"--config {kind}.yaml" in block.code]
    assert line.startswith("onstep run -m trl.scripts.")
    return ["-m", "onstep.run", *line.split()[2:], *TRIED.split()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_recipe_continues_to_the_same_bits(kind: str, twice: list[Path]) -> None:
    whole, killed = twice
    finish(command(kind), whole)
    with start(command(kind), killed) as process:
        while process.poll() is None and not list((killed / "runs" / kind).glob("checkpoint-*/manifest.json")):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    finish(command(kind), killed)
    one, other = (load_file(directory / "runs" / kind / "adapter_model.safetensors") for directory in twice)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
    assert numbers(whole, f"runs/{kind}") == numbers(killed, f"runs/{kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_with_one_more_import_trains_as_with_transformers(kind: str, twice: list[Path]) -> None:
    [code] = [block.code for block in blocks(ROOT / "docs" / "guide" / f"{KINDS[kind]}.md", "python")]
    assert code.startswith(LINE)
    for directory, text in zip(twice, (code.split("\n", 1)[1], code), strict=True):
        (directory / "train.py").write_text(text)
        finish(["train.py"], directory)
    theirs, ours = (numbers(directory, f"runs/{kind}-script") for directory in twice)
    assert not (twice[0] / "runs" / f"{kind}-script" / "record.jsonl").exists()
    assert (twice[1] / "runs" / f"{kind}-script" / "record.jsonl").exists()
    assert len(theirs) >= 6
    for one, other in zip(theirs, ours, strict=True):
        shared = one.keys() & other.keys()
        assert {"loss"} <= shared or any(name.startswith("eval") for name in shared)
        assert {name: other[name] for name in shared} == pytest.approx({k: one[k] for k in shared}, abs=1e-6)
