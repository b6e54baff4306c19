"""A Trainer's files are where Hugging Face's tools look for them, and where ours do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification
from transformers.trainer_utils import get_last_checkpoint

from onstep import Trainer
from onstep.checkpoint import read_manifest, verify
from onstep.checkpoint.catalog.inventory import unlisted_files
from onstep.cli.main import main
from tests.support.small_models import arguments, causal_rows, qwen


class Tokens:
    """A processing class as far as saving goes."""

    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")


def trained(tmp_path: Path, model: Any = None, rows: Any = None, resume: Any = None, **options: Any) -> Trainer:
    args = arguments(tmp_path, **{"max_steps": 3, "save_steps": 1, "config_overrides": None, **options})
    rows = causal_rows(8) if rows is None else rows
    own = {"processing_class": Tokens(), "default_callbacks": False, "eval_dataset": rows}
    trainer = Trainer(qwen() if model is None else model, args, train_dataset=rows, **own)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    directory = tmp_path_factory.mktemp("layout")
    return directory / "run", trained(directory, logging_steps=1)


OF_HUGGING_FACE = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "trainer_state.json",
    "training_args.json",
}


def test_the_files_are_where_tools_look(run: tuple[Path, Trainer]) -> None:
    directory, _ = run
    assert {path.name for path in directory.iterdir()} >= OF_HUGGING_FACE
    assert {path.name for path in (directory / "checkpoint-2").iterdir() if path.is_file()} == {
        *OF_HUGGING_FACE,
        "manifest.json",
    }
    assert get_last_checkpoint(str(directory)) == str(directory / "checkpoint-3")


def test_the_last_checkpoint_is_the_final_model(run: tuple[Path, Trainer]) -> None:
    directory, trainer = run
    for place in (directory, directory / "checkpoint-3"):
        again = AutoModelForCausalLM.from_pretrained(place)
        torch.testing.assert_close(again.state_dict(), trainer.model.state_dict(), rtol=0, atol=0)
        assert again.config.architectures == ["Qwen2ForCausalLM"]


def test_weights_whose_names_transformers_changes_are_read_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, **sizes))
    rows = [{"input_ids": row["input_ids"], "labels": 1} for row in causal_rows(8)]
    trained(tmp_path, model, rows, max_steps=1)
    again = BertForSequenceClassification.from_pretrained(tmp_path / "run" / "checkpoint-1")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_the_state_is_hugging_faces(run: tuple[Path, Trainer]) -> None:
    from transformers import TrainerState

    directory, trainer = run
    state = TrainerState.load_from_json(str(directory / "checkpoint-2" / "trainer_state.json"))
    assert (state.global_step, state.max_steps, state.epoch) == (2, 3, 1.0)
    assert [record["step"] for record in state.log_history if "loss" in record] == [1, 2]
    final = TrainerState.load_from_json(str(directory / "trainer_state.json"))
    assert final.global_step == trainer.state.global_step == 3
    written = json.loads((directory / "training_args.json").read_text())
    assert (written["max_steps"], written["learning_rate"]) == (3, 0.05)


def test_the_manifest_covers_every_file_and_weights_are_there_once(run: tuple[Path, Trainer]) -> None:
    checkpoint = run[0] / "checkpoint-2"
    assert unlisted_files(checkpoint, verify(checkpoint)) == []
    assert [path.name for path in checkpoint.rglob("model*.safetensors")] == ["model.safetensors"]
    assert read_manifest(checkpoint).components["model"].files == ["model.safetensors", "model/state.json"]


def test_a_damaged_file_of_hugging_face_is_found(run: tuple[Path, Trainer], tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(run[0] / "checkpoint-2", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "config.json").write_text("{}")
    assert main(["checkpoint", "verify", str(tmp_path / "checkpoint-2")]) == 1
    assert "config.json" in capsys.readouterr().out


def test_the_commands_read_a_trainers_directory(run: tuple[Path, Trainer], tmp_path: Path, capsys: Any) -> None:
    directory = str(run[0])
    for command in (
        ["checkpoint", "list", directory],
        ["checkpoint", "verify", directory],
        ["checkpoint", "diff", f"{directory}@2", f"{directory}@2"],
        ["checkpoint", "export", f"{directory}@2", str(tmp_path / "weights.safetensors")],
        ["checkpoint", "export", f"{directory}@2", str(tmp_path / "exported")],
        ["why", directory],
    ):
        assert main(command) == 0, (command, capsys.readouterr())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    at_step_2 = AutoModelForCausalLM.from_pretrained(run[0] / "checkpoint-2")
    torch.testing.assert_close(again.state_dict(), at_step_2.state_dict(), rtol=0, atol=0)


def test_an_overridden_save_model_adds_its_files_to_checkpoints(tmp_path: Path) -> None:
    class Notes(Trainer):
        def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir)
            Path(str(output_dir), "note.txt").write_text(Path(str(output_dir)).name)

    args = arguments(tmp_path, max_steps=2, save_steps=1)
    Notes(qwen(), args, train_dataset=causal_rows(8), default_callbacks=False).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert (checkpoint / "note.txt").read_text() == "checkpoint-2"
    assert unlisted_files(checkpoint, verify(checkpoint)) == []
    assert sorted(path.name for path in checkpoint.iterdir() if path.name.startswith((".", "model"))) == [
        "model",
        "model.safetensors",
    ]


def test_rotation_and_the_best_model(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1}
    trainer = trained(tmp_path, max_steps=4, save_total_limit=1, learning_rate=0.9, **best)
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
    assert kept == sorted({f"checkpoint-{trainer.state.best_global_step}", "checkpoint-4"})
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / kept[0])


def test_a_checkpoint_of_the_directory_is_a_start(tmp_path: Path) -> None:
    first = trained(tmp_path)
    again = trained(tmp_path, qwen(seed=4), resume=get_last_checkpoint(str(tmp_path / "run")))
    assert again.state.global_step == 3
    torch.testing.assert_close(again.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)
