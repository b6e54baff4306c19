"""`onstep train --hf-model`: a model of Hugging Face is trained further on text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub.constants as hub
import pytest
from huggingface_hub import snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

from onstep import Trainer, TrainingArguments
from onstep.cli.main import main
from onstep.record import read_records
from onstep.training.runs.run_dir import RunDir
from tests.support.small_weights import gpt2, llama

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
OF_RECIPE = [word for word in SMALL if "seq_length" not in word]


def lengths(run: str = "mine") -> tuple[int, int]:
    """The sequence length of the model and of the data of a run."""
    config = RunDir(Path("runs") / run).read()["config"]
    return config["model"]["seq_length"], config["dataset"]["seq_length"]


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


def test_a_revision_of_the_hub_is_pinned_and_recorded() -> None:
    snapshots = Path("hub/models--me--small/snapshots")
    old, new = (snapshots / (digit * 40) for digit in "12")
    llama(old)
    llama(new, hidden_size=64)
    for ref, snapshot in (("main", new), ("v1", old)):
        (snapshots.parent / "refs").mkdir(exist_ok=True)
        (snapshots.parent / "refs" / ref).write_text(snapshot.name)
    for revision, name, snapshot in (("@v1", "tag", old), (f"@{old.name}", "commit", old), ("", "newest", new)):
        assert main(["train", "--hf-model", f"me/small{revision}", f"run.name={name}", *SMALL]) == 0
        record = RunDir(Path("runs") / name).read()
        assert record["hub_revisions"] == {"me/small": snapshot.name}
        assert Path(record["config"]["checkpoint"]["pretrained_checkpoint"]).name == snapshot.name


def test_a_trainer_records_the_revision_that_its_model_was_loaded_from() -> None:
    llama(Path("hub/models--me--small/snapshots") / ("1" * 40))
    model = AutoModelForCausalLM.from_pretrained(snapshot_download("me/small", revision="1" * 40))
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    Trainer(model, TrainingArguments("out", max_steps=1, report_to="none"), train_dataset=rows).train()
    assert RunDir(Path("out")).read()["hub_revisions"] == {"me/small": "1" * 40}


def test_a_revision_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    llama(Path("hub/models--me--small/snapshots") / ("1" * 40))
    assert main(["train", "--hf-model", "me/small@v2", *SMALL]) == 1
    assert "--hf-model=me/small@v2 is neither" in capsys.readouterr().err


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


@pytest.mark.parametrize(("make", "limit"), [(llama, 64), (gpt2, 32)])
def test_sequences_are_no_longer_than_the_positions_of_the_model(
    make: Any, limit: int, capsys: pytest.CaptureFixture[str]
) -> None:
    make(Path("base"))
    assert AutoConfig.from_pretrained("base").max_position_embeddings == limit
    assert main(["train", "--hf-model", "base", "run.name=mine", *OF_RECIPE]) == 0
    assert lengths() == (limit, limit)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("--hf-model")]
    assert said == [f"--hf-model: sequences have {limit} tokens, the model's max_position_embeddings, not 1024"]


def test_a_model_with_more_positions_keeps_the_length_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    llama(Path("base"), max_position_embeddings=2048)
    Path("text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 600)
    assert main(["train", "--hf-model", "base", "run.name=mine", *OF_RECIPE, "train.train_iters=1"]) == 0
    assert lengths() == (1024, 1024)
    assert "--hf-model:" not in capsys.readouterr().err


@pytest.mark.parametrize("in_file", [False, True])
def test_more_than_the_positions_is_taken_with_a_warning_where_it_is_set(
    in_file: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    llama(Path("base"))
    words = ["model.seq_length=128", "dataset.seq_length=128"]
    if in_file:
        Path("mine.yaml").write_text("model:\n  seq_length: 128\ndataset.seq_length: 128\n")
        words = ["mine.yaml"]
    assert main(["train", "--hf-model", "base", "run.name=mine", *OF_RECIPE, *words]) == 0
    assert lengths() == (128, 128)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("--hf-model")]
    assert said == [
        "--hf-model: model.seq_length=128 is more than the model's max_position_embeddings=64; it has not learned the "
        "positions beyond"
    ]


def test_more_than_learned_positions_is_an_error_where_it_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    gpt2(Path("base"))
    words = ["model.seq_length=128", "dataset.seq_length=128"]
    assert main(["train", "--hf-model", "base", "run.name=mine", *OF_RECIPE, *words]) == 1
    assert "model.seq_length=128 must be 32" in capsys.readouterr().err
