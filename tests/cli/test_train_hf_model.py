"""`onstep train --hf-model`: a model of Hugging Face is trained further on text."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants as hub
import pytest
from transformers import AutoModelForCausalLM

from onstep.cli.main import main
from onstep.metrics_log import read_records
from tests.support.small_weights import llama

SMALL = [
    "dataset.paths=[text.txt]",
    "dataset.cache_dir=cache",
    "dataset.split=80,10,10",
    "dataset.num_workers=0",
    "dataset.seq_length=32",
    "model.seq_length=32",
    "train.train_iters=2",
    "train.global_batch_size=2",
    "scheduler.lr_warmup_iters=0",
    "validation.eval_iters=1",
    "logger.log_interval=1",
    "mixed_precision=null",
    "dist.device=cpu",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    Path("text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 60)


def distance(first: Path, second: Path) -> float:
    """Largest difference of a weight of two models."""
    one, other = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (first, second))
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def test_a_directory_is_trained_further() -> None:
    llama(Path("base"))
    assert main(["train", "--hf-model", "base", "run.name=mine", *SMALL]) == 0
    assert 0 < distance(Path("base"), Path("runs/mine/model")) < 1e-3
    assert all(record["loss"] > 0 for record in read_records(Path("runs/mine/trainer_logs.json")) if "loss" in record)


def test_a_name_of_the_hub_is_found_where_it_was_downloaded() -> None:
    snapshot = Path("hub/models--me--small/snapshots/0123456789012345678901234567890123456789")
    llama(snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    assert main(["train", "--hf-model", "me/small", "run.name=mine", *SMALL]) == 0
    assert 0 < distance(snapshot, Path("runs/mine/model")) < 1e-3


@pytest.mark.parametrize("name", ["nobody/nothing", "./nothing", "a/b/c"])
def test_a_model_that_is_nowhere_is_an_error(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--hf-model", name, *SMALL]) == 1
    assert f"--hf-model={name} is n" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_weights_of_another_architecture_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    llama(Path("base"))
    config = Path("base/config.json")
    config.write_text(config.read_text().replace('"llama"', '"bert"').replace("LlamaForCausalLM", "BertLMHeadModel"))
    assert main(["train", "--hf-model", "base", *SMALL]) == 1
    assert "bert" in capsys.readouterr().err.lower()
