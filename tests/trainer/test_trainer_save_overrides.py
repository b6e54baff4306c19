"""A Trainer whose saving methods are overridden: what they write is part of the checkpoints and the final weights."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from onstep import Trainer, TrainerCallback
from onstep.checkpoint.storage.manifest import verify
from onstep.errors import ConfigError
from tests.support.forked_processes import Processes, output_of
from tests.support.small_models import Regression, arguments, causal_rows, quiet, qwen, regression_rows

SAVES = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2, "logging_steps": 1}


def checkpoints(trainer: Trainer) -> dict[str, set[str]]:
    """The names in each checkpoint, after verifying it."""
    root = Path(trainer._get_output_dir(None))
    found = sorted(root.glob("checkpoint-*"))
    for path in found:
        verify(path)
    return {path.name: {one.name for one in path.iterdir()} for path in found}


class Adapter(Trainer):
    """Writes a file beside each checkpoint, as LLaVA and scripts for PEFT do."""

    before = True
    calls = 0

    def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
        type(self).calls += 1
        if self.before:
            self.write(trial)
        super()._save_checkpoint(model, trial)
        if not self.before:
            self.write(trial)

    def write(self, trial: Any) -> None:
        directory = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
        os.makedirs(directory, exist_ok=True)
        torch.save({"weight": self.model.layer.weight}, os.path.join(directory, "adapter.bin"))


@pytest.mark.parametrize("before", [True, False])
def test_files_of_an_overridden_save_checkpoint_are_beside_ours(tmp_path: Path, before: bool) -> None:
    cls = type("Mine", (Adapter,), {"before": before, "calls": 0})
    trainer = cls(Regression(), arguments(tmp_path, **SAVES), train_dataset=regression_rows(8), default_callbacks=False)
    trainer.train()
    found = checkpoints(trainer)
    assert set(found) == {"checkpoint-2", "checkpoint-4"}
    assert all({"adapter.bin", "manifest.json"} <= names for names in found.values())
    assert cls.calls == 2, "once for each step, though the last one is saved again with the final record"


def test_with_asynchronous_saves_the_checkpoint_is_there_when_super_returns(tmp_path: Path) -> None:
    class Mine(Adapter):
        before = False

        def write(self, trial: Any) -> None:
            directory = os.path.join(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}")
            assert Path(directory, "manifest.json").exists()

    options = {**SAVES, "config_overrides": {"run.save_weights": False, "checkpoint.async_save": True}}
    trainer = Mine(Regression(), arguments(tmp_path, **options), train_dataset=regression_rows(8))
    trainer.train()
    assert set(checkpoints(trainer)) == {"checkpoint-2", "checkpoint-4"}


def test_without_super_what_the_override_wrote_is_the_save(tmp_path: Path) -> None:
    class OnlyAdapter(Adapter):
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            self.write(trial)

    steps: list[int] = []

    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    trainer = OnlyAdapter(
        Regression(),
        arguments(tmp_path, **SAVES),
        train_dataset=regression_rows(8),
        callbacks=[Saves()],
        default_callbacks=False,
    )
    trainer.train()
    root = Path(trainer._get_output_dir(None))
    assert {path.name: [one.name for one in path.iterdir()] for path in root.glob("checkpoint-*")} == {
        "checkpoint-2": ["adapter.bin"],
        "checkpoint-4": ["adapter.bin"],
    }
    assert steps == [2, 4]


def test_a_step_that_is_repeated_after_a_rollback_is_saved_again(tmp_path: Path) -> None:
    steps: list[int] = []

    class Mine(Adapter):
        def write(self, trial: Any) -> None:
            steps.append(self.state.global_step)
            super().write(trial)

    class GoesBack(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 5 and len(steps) == 2:
                control.rollback("a test", to_step=2)

    args = arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=6)
    trainer = Mine(Regression(), args, train_dataset=regression_rows(8), callbacks=[GoesBack()])
    trainer.train()
    assert steps == [2, 4, 4, 6]
    saved = torch.load(Path(trainer._get_output_dir(None), "checkpoint-4", "adapter.bin"))
    weights = load_file(Path(trainer._get_output_dir(None), "checkpoint-4", "model.safetensors"))
    assert torch.equal(saved["weight"], weights["layer.weight"])


def test_an_assigned_save_checkpoint_is_called(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path, **SAVES), regression_rows(8))
    original, steps = trainer._save_checkpoint, []

    def save(model: Any, trial: Any) -> None:
        steps.append(trainer.state.global_step)
        original(model, trial)

    trainer._save_checkpoint = save  # type: ignore[method-assign,assignment]
    trainer.train()
    assert steps == [2, 4]
    assert set(checkpoints(trainer)) == {"checkpoint-2", "checkpoint-4"}


def test_a_checkpoint_that_is_not_due_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"should_save = True in a callback"):
        quiet(Regression(), arguments(tmp_path))._save_checkpoint(None, None)


@pytest.mark.parametrize("name", ["_save", "save_model"])
def test_an_overridden_save_is_called_for_checkpoints_and_final_weights(tmp_path: Path, name: str) -> None:
    def save(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> None:
        getattr(Trainer, name)(self, output_dir, *args, **kwargs)
        Path(str(output_dir), "note.txt").write_text("mine")

    cls: Any = type("Mine", (Trainer,), {name: save})
    args = arguments(tmp_path, **SAVES, config_overrides={})
    trainer = cls(Regression(), args, train_dataset=regression_rows(8), default_callbacks=False)
    trainer.train()
    for names in checkpoints(trainer).values():
        assert {"note.txt", "model.safetensors", "manifest.json"} <= names
    trainer.save_model(str(tmp_path / "out"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "note.txt",
        "model.safetensors",
        "training_args.json",
    }


def test_save_writes_the_weights_that_it_is_given(tmp_path: Path) -> None:
    trainer = quiet(Regression(), arguments(tmp_path))
    weights = {name: tensor + 1 for name, tensor in trainer.model.state_dict().items()}
    trainer._save(str(tmp_path / "plain"), state_dict=weights)
    torch.testing.assert_close(load_file(tmp_path / "plain" / "model.safetensors"), weights)
    trainer = quiet(qwen(), arguments(tmp_path))
    weights = {name: tensor + 1 for name, tensor in trainer.model.state_dict().items()}
    trainer._save(str(tmp_path / "theirs"), state_dict=weights)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    torch.testing.assert_close(again.state_dict(), weights)


def tokenizer(**special: str) -> Any:
    words = ["<pad>", "<end>", "<turn>", "<start>", *(f"w{n}" for n in range(19))]
    inner = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


class Collator:
    """A data collator with a tokenizer, as those of `transformers` have one."""

    def __init__(self, own: Any) -> None:
        self.tokenizer = own

    def __call__(self, rows: list[Any]) -> Any:
        return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def test_the_tokenizer_of_the_collator_is_saved_with_the_model(tmp_path: Path) -> None:
    own = tokenizer(pad_token="<pad>", eos_token="<turn>")
    trainer = quiet(qwen(), arguments(tmp_path), causal_rows(4), data_collator=Collator(own))
    trainer.save_model(str(tmp_path / "out"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<turn>"
    other = tokenizer(pad_token="<pad>", eos_token="<end>")
    trainer = quiet(qwen(), arguments(tmp_path), data_collator=Collator(own), processing_class=other)
    trainer.save_model(str(tmp_path / "out"))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<end>"


def test_a_chat_model_taught_a_new_end_token_stops_after_reload(tmp_path: Path, caplog: Any) -> None:
    own = tokenizer(pad_token="<pad>", eos_token="<turn>", bos_token="<start>")
    start, turn = own.bos_token_id, own.eos_token_id
    row = {"input_ids": [start, 5, turn, 6, 6, 6], "labels": [start, 5, turn, 6, 6, 6]}
    model = qwen(eos_token_id=1, bos_token_id=None, pad_token_id=None)
    args = arguments(tmp_path, num_train_epochs=30, optim="adamw_torch", lr_scheduler_type="constant")
    trainer = quiet(model, args, [row] * 8, processing_class=own)
    trainer.train()
    (line,) = [one.message for one in caplog.records if "special tokens" in one.message]
    assert f"eos_token_id={turn}, bos_token_id={start}, pad_token_id=0" in line
    trainer.save_model(str(tmp_path / "out"))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    said = again.generate(torch.tensor([[start]]), max_new_tokens=5, do_sample=False)
    assert said.tolist() == [[start, 5, turn]]


@pytest.mark.parametrize("end", [1, [1, 4], None])
@pytest.mark.parametrize("special", [{"eos_token": "<turn>"}, {"eos_token": "<end>", "pad_token": "<pad>"}, {}])
def test_special_tokens_are_aligned_as_by_transformers(tmp_path: Path, end: Any, special: dict[str, str]) -> None:
    from transformers.trainer_utils import align_special_tokens as theirs

    from onstep.trainer.reporting.special_tokens import align_special_tokens as ours

    aligned = []
    for align in (theirs, ours):
        model = qwen(eos_token_id=end, pad_token_id=None)
        align(model, tokenizer(**special))
        aligned.append((model.config.to_dict(), model.generation_config.to_dict()))
    assert aligned[0] == aligned[1]


def test_the_model_card_has_the_facts_of_the_run(tmp_path: Path) -> None:
    import yaml

    args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=2, logging_steps=1, learning_rate=0.05)
    trainer = quiet(qwen(), args, causal_rows(4), eval_dataset=causal_rows(4))
    trainer.train()
    trainer.create_model_card(
        language="en", license="mit", tags="tiny", finetuned_from="me/base", tasks="text-generation", dataset="rows"
    )
    text = (tmp_path / "run" / "README.md").read_text()
    _, metadata, body = text.split("---\n", 2)
    assert yaml.safe_load(metadata) == {
        "library_name": "transformers",
        "language": "en",
        "license": "mit",
        "tags": ["tiny", "generated_from_trainer", "onstep"],
        "base_model": "me/base",
        "pipeline_tag": "text-generation",
        "model_name": "run",
    }
    assert "Fine-tuned from `me/base` on rows with Onstep." in body
    assert "- learning_rate: 0.05" in body
    assert "- train_loss: " in body
    evaluations = [record for record in trainer.state.log_history if "eval_loss" in record]
    assert all(
        f"| {record['step']} | {record['epoch']:.6g} | {record['eval_loss']:.6g} |" in body for record in evaluations
    )


def test_callbacks_are_added_and_removed_by_class_and_by_instance(tmp_path: Path) -> None:
    class One(TrainerCallback):
        pass

    trainer = quiet(Regression(), arguments(tmp_path))
    trainer.add_callback(One)
    popped = trainer.pop_callback(One)
    assert isinstance(popped, One)
    trainer.add_callback(popped)
    trainer.remove_callback(popped)
    assert trainer.pop_callback(One) is None


def test_a_failed_save_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """An error of the override ends the run; what it wrote is there to look at, and the checkpoint before is intact."""

    class Fails(Adapter):
        def _save_checkpoint(self, model: Any, trial: Any, metrics: Any = None) -> None:
            self.write(trial)
            if self.state.global_step == 4:
                raise OSError("no space")
            super()._save_checkpoint(model, trial)

    trainer = Fails(Regression(), arguments(tmp_path, **SAVES), train_dataset=regression_rows(8))
    with pytest.raises(OSError, match="no space"):
        trainer.train()
    root = Path(trainer._get_output_dir(None))
    verify(root / "checkpoint-2")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"


class RenamesWeights(Trainer):
    """Writes its weights under other names, as sentence-transformers does."""

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        weights = {f"body.{name}": value for name, value in self.model.state_dict().items()}
        os.makedirs(str(output_dir), exist_ok=True)
        save_file(weights, os.path.join(str(output_dir), "model.safetensors"))


def test_weights_that_a_save_writes_under_other_names_stay_in_the_checkpoint(tmp_path: Path) -> None:
    def made(**changes: Any) -> Trainer:
        torch.manual_seed(0)
        args = arguments(tmp_path, **{**SAVES, **changes})
        return RenamesWeights(Regression(), args, train_dataset=regression_rows(8), default_callbacks=False)

    whole = made()
    whole.train()
    root = Path(whole._get_output_dir(None))
    theirs = load_file(root / "checkpoint-2" / "model.safetensors")
    assert theirs.keys() == {f"body.{name}" for name in whole.model.state_dict()}
    assert {"model", "model.safetensors"} <= checkpoints(whole)["checkpoint-2"]
    again = made(resume_from_checkpoint=str(root / "checkpoint-2"))
    again.train()
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(again.model.state_dict()[name], value, rtol=0, atol=0)


def test_what_a_kill_leaves_of_a_checkpoint_with_files_of_an_override_is_passed_over(
    processes: Processes, tmp_path: Path
) -> None:
    def run(name: str, kill_at: int, start: int = 0) -> int:
        settings = {"output": str(tmp_path / name), "kill_at": kill_at}
        [code] = processes.run(
            "tests.support.jobs.state_override_jobs", "killed_while_saving", tmp_path / f"{name}-{start}", settings
        )
        return code

    processes.load("transformers.trainer_utils")
    assert run("whole", 0) == 0
    assert [run("killed", 2), run("killed", 4, start=1)] == [-signal.SIGKILL] * 2
    said = tmp_path / "killed-2"
    assert run("killed", 0, start=2) == 0, output_of(said)
    assert "checkpoint-4 is unfinished: its run was killed while saving it." in output_of(said)
    assert "continuing from step 2" in output_of(said)
    ended, whole = (next((tmp_path / kind).rglob("checkpoint-4/model.safetensors")) for kind in ("killed", "whole"))
    assert ended.read_bytes() == whole.read_bytes()
