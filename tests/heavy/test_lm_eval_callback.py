"""`LmEvalCallback`: tasks of lm-eval during training, without an effect on it, once each after a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from onstep import Callback, Trainer, TrainingArguments, pretrain
from onstep.analysis.logs.task_results import evaluations_of_run, metrics_of
from onstep.callbacks import LmEvalCallback
from onstep.cli.main import main
from onstep.config import apply_overrides
from onstep.errors import ConfigError
from tests.heavy.test_evaluate import CHOICE
from tests.support.small_configs import small_pretrain_config

transformers = pytest.importorskip("transformers")
pytest.importorskip("lm_eval.tasks")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a task and its data, without network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"def f{i}(x):", "choices": [" return", "x", " a: 1"], "answer": i % 3} for i in range(6)]
    Path("questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    Path("own").mkdir()
    Path("own/first.yaml").write_text(CHOICE.format(name="first"))


def tasks() -> LmEvalCallback:
    return LmEvalCallback("first", every=2, include_path="own")


class Fails(Callback):
    """Ends the run with an error before its third step ends."""

    def on_train_step_end(self, context: Any) -> None:
        if context.step == 2:
            raise RuntimeError("killed")


def run(corpus: Path, cache: Path, name: str, *callbacks: Any, words: Sequence[str] = ()) -> Path:
    """Four steps with dropout and a checkpoint at each second one."""
    config = small_pretrain_config(corpus, cache)
    config.run.name, config.run.output_dir = name, "runs"
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = 4, 2, 2
    own = ["checkpoint.save_interval=2", "logger.log_interval=1", "optimizer.lr=0.05", "model.hidden_dropout=0.2"]
    apply_overrides(config, [*own, "validation.eval_interval=null", "scheduler.lr_warmup_iters=0", *words])
    pretrain(config, callbacks=list(callbacks))
    return Path("runs", name)


def kept(directory: Path) -> list[tuple[int | None, dict[str, float]]]:
    return [(one.step, metrics_of(one.tasks)) for one in evaluations_of_run(directory)]


def losses(directory: Path) -> list[float]:
    lines = map(json.loads, (directory / "record.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "log" and "loss" in line]


def test_training_is_the_same_and_a_resumed_run_has_each_evaluation_once(
    corpus: Path, token_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, evaluated = run(corpus, token_cache, "plain"), run(corpus, token_cache, "evaluated", tasks())
    with pytest.raises(RuntimeError, match="killed"):
        run(corpus, token_cache, "resumed", tasks(), Fails())
    resumed = run(corpus, token_cache, "resumed", tasks())
    weights = load_file(plain / "model/model.safetensors")
    for directory in (evaluated, resumed):
        found = load_file(directory / "model/model.safetensors")
        assert all(torch.equal(weight, found[name]) for name, weight in weights.items())
        assert losses(directory) == losses(plain)
    assert [step for step, _ in kept(evaluated)] == [2, 4]
    assert kept(resumed) == kept(evaluated)

    for step, metrics in kept(evaluated):
        capsys.readouterr()
        words = ["plain" + f"@{step}", "--tasks", "first", "--include-path", "own", "--device", "cpu", "--json"]
        assert main(["evaluate", *words]) == 0
        of_checkpoint = json.loads(capsys.readouterr().out)["tasks"]["first"]["metrics"]
        assert metrics == {f"eval_first_{name}": value for name, value in of_checkpoint.items()}
    assert main(["why", "evaluated"]) == 0
    assert "step 2: tasks evaluated while it trained" in capsys.readouterr().out


def test_the_matrices_of_lora_are_merged_for_an_evaluation_and_no_programs_are_asked(
    corpus: Path, token_cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("torch.utils.collect_env.get_pretty_env_info", lambda: asked.append("pip, lscpu, ..."))
    source = run(corpus, token_cache, "source")
    words = ["peft.peft_scheme=lora", f"checkpoint.pretrained_checkpoint={source / 'model'}", "optimizer.lr=1.0"]
    directory = run(corpus, token_cache, "adapted", tasks(), words=words)
    found = dict(kept(directory))
    assert found[2] != found[4]
    capfd.readouterr()
    shown = ["adapted@4", "--tasks", "first", "--include-path", "own", "--device", "cpu", "--json"]
    assert main(["evaluate", *shown]) == 0
    out, err = capfd.readouterr()
    metrics = json.loads(out)["tasks"]["first"]["metrics"]
    assert found[4] == {f"eval_first_{name}": value for name, value in metrics.items()}
    assert "fatal" not in err, "of git"
    assert not asked


def test_a_trainers_model_is_evaluated_as_it_is_without_an_effect(corpus: Path, token_cache: Path) -> None:
    source = run(corpus, token_cache, "source") / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.pad_token = tokenizer.eos_token
    rows = [{"input_ids": [1, 2, 3, i], "labels": [1, 2, 3, i]} for i in range(8)]
    trained = []
    for callbacks in ([], [tasks()]):
        model = transformers.AutoModelForCausalLM.from_pretrained(source, attention_dropout=0.5)
        arguments = TrainingArguments(f"out/{len(callbacks)}", max_steps=4, learning_rate=0.1, use_cpu=True, seed=3)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks
        )
        trainer.train()
        trained.append(trainer)
    plain, evaluated = (one.model.state_dict() for one in trained)
    assert all(torch.equal(weight, evaluated[name]) for name, weight in plain.items())
    found = [one for one in trained[1].state.log_history if "eval_first_acc" in one]
    assert [one["step"] for one in found] == [2, 4]
    assert kept(Path("out/1")) == [
        (one["step"], {name: value for name, value in one.items() if name.startswith("eval_first")}) for one in found
    ]


def test_what_cannot_be_evaluated_is_refused_when_training_begins(
    corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="every must be an integer >= 1, got 0"):
        LmEvalCallback("first", every=0)
    with pytest.raises(ConfigError, match="--include-path nowhere is not a directory"):
        run(corpus, token_cache, "one", LmEvalCallback("first", every=1, include_path="nowhere"))
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
        )
    )
    rows = [{"input_ids": [1, 2], "labels": [1, 2]}]
    trainer = Trainer(model, TrainingArguments("out", use_cpu=True), train_dataset=rows, callbacks=[tasks()])
    with pytest.raises(ConfigError, match="requires a tokenizer; pass processing_class"):
        trainer.train()
