"""`onstep finetune`: trained weights, conversations, one command."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from onstep.cli.main import main
from onstep.config import ConfigContainer, DatasetConfig
from onstep.data import learn_bpe, tokenizer_source
from onstep.errors import DataError, OnstepError
from onstep.training import GlobalState, pretrain
from tests.support.small_weights import llama

SMALL = [
    "checkpoint.pretrained_checkpoint=base",
    "dataset.paths=[chat.jsonl]",
    "dataset.split=80,10,10",
    "dataset.cache_dir=cache",
    "dataset.num_workers=0",
    "dataset.seq_length=64",
    "model.seq_length=64",
    "train.num_epochs=1",
    "train.global_batch_size=4",
    "validation.eval_iters=1",
    "logger.log_interval=1",
    "mixed_precision=null",
    "dist.device=cpu",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with weights in base/ and conversations in chat.jsonl."""
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "base")
    lines = [json.dumps({"prompt": f"What is {n} + 1?", "response": f"It is {n + 1}."}) for n in range(60)]
    Path("chat.jsonl").write_text("\n".join(lines))


def test_any_model_is_fine_tuned_with_lora(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--lora", *SMALL]) == 0
    run = Path("runs/any_finetune_lora")
    assert json.loads((run / "run.json").read_text())["status"] == "completed"
    weights = ["adapter_config.json", "adapter_model.safetensors"]
    assert sorted(os.listdir(run / "adapter")) == [*weights, "tokenizer.json", "tokenizer_config.json"]
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.hidden_size == 32
    out = capsys.readouterr().out
    assert "Trainable percentage" in out
    assert f"adapter     {run}/adapter" in out
    assert main(["finetune", "--lora", *SMALL]) == 0
    assert "is finished" in capsys.readouterr().out


def test_a_recipe_is_taken_in_its_form_for_fine_tuning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "tiny_gpt", "validation.eval_on_start=false", *SMALL]) == 0
    assert json.loads(Path("runs/tiny_gpt_finetune/run.json").read_text())["config"]["run"]["recipe"] == (
        "tiny_gpt_finetune"
    )
    assert main(["finetune", "qwen25_500m", *SMALL]) == 1
    assert "model.num_layers=24 does not match the weights in base, which have 2" in capsys.readouterr().err


def given(monkeypatch: pytest.MonkeyPatch, *words: str) -> ConfigContainer:
    """The configuration that would be trained."""
    found: list[ConfigContainer] = []

    def note(start: Any, config: ConfigContainer, *rest: Any) -> GlobalState:
        found.append(config)
        return GlobalState()

    monkeypatch.setattr("onstep.cli.train.run_to_its_end", note)
    assert main(["finetune", *words, *SMALL]) == 0
    return found[0]


@pytest.mark.parametrize("recipe", ["any_finetune", "any_finetune_lora", "any", "any_finetune_config"])
def test_with_lora_a_recipe_is_taken_in_its_form_for_that(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = given(monkeypatch, recipe, "--lora")
    assert (config.run.recipe, config.optimizer.lr, config.peft.peft_scheme) == ("any_finetune_lora", 2e-4, "lora")
    assert given(monkeypatch, "any_finetune").optimizer.lr == 1e-5


def test_with_lora_a_file_keeps_its_learning_rate_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text("run: {recipe: any_finetune}\noptimizer: {lr: 3.0e-05}\n")
    config = given(monkeypatch, "mine.yaml", "--lora")
    assert (config.optimizer.lr, config.peft.peft_scheme) == (3e-5, "lora")
    assert "keeping optimizer.lr=3e-05 of the file" in capsys.readouterr().err


def test_with_qlora_the_base_is_held_in_4_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = given(monkeypatch, "any", "--qlora")
    assert (config.run.recipe, config.peft.base_quantization) == ("any_finetune_lora", "nf4")
    assert main(["finetune", "--qlora", "peft.base_quantization=int8", *SMALL]) == 1
    assert "--qlora means peft.base_quantization=nf4, which conflicts with" in capsys.readouterr().err
    assert main(["finetune", "--lora", "peft.base_quantization=fp4", *SMALL]) == 1
    assert "peft.base_quantization='fp4' must be nf4 | int8. Did you mean 'nf4'?" in capsys.readouterr().err


def test_lora_and_another_scheme_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--lora", "peft.peft_scheme=null", *SMALL]) == 1
    assert "conflicts with peft.peft_scheme=null" in capsys.readouterr().err


def test_train_with_such_a_recipe_is_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", *SMALL]) == 0
    capsys.readouterr()
    assert main(["train", "--recipe", "any_finetune", *SMALL]) == 0
    assert "runs/any_finetune is finished" in capsys.readouterr().out


def test_what_is_missing_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    words = [word for word in SMALL if "pretrained" not in word]
    assert main(["finetune", *words]) == 1
    assert "finetune=True requires weights to start from" in capsys.readouterr().err
    assert main(["finetune", *words, "checkpoint.pretrained_checkpoint=bse"]) == 1
    assert "checkpoint.pretrained_checkpoint=bse does not exist" in capsys.readouterr().err
    assert main(["finetune", "tiny_gtp", *words]) == 1
    assert "unknown recipe 'tiny_gtp'. Did you mean 'tiny_gpt'?" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_run_or_directory_without_weights_is_named_with_what_starts_it(capsys: pytest.CaptureFixture[str]) -> None:
    for name, record in (("begun", "{}"), ("scripted", '{"layout": "hugging_face"}'), ("empty", None)):
        Path("runs", name).mkdir(parents=True)
        if record is not None:
            Path("runs", name, "run.json").write_text(record)
    Path("runs/full/checkpoints/checkpoint-2").mkdir(parents=True)
    for name, words in (
        ("begun", "runs/begun has no checkpoint and no weights that could be fine-tuned yet"),
        ("begun", "with onstep train begun"),
        ("scripted", "with its script"),
        ("empty", "no run has started (it has no run.json) and no model is; start a run of that name: onstep finetune"),
        ("full", "to fine-tune its weights, write checkpoint.pretrained_checkpoint=full"),
        ("mine", "no run 'runs/mine', which is stored once it has started"),
    ):
        assert main(["finetune", name]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_act": ["silu"]}, "config.json has hidden_act = ['silu'], which must be a string"),
        ({"rope_parameters": 3}, "config.json has rope_parameters = 3, which must be an object"),
        (
            {"vocab_size": 10**9},
            "model.vocab_size=1000000000 make a model of 64,000,015,520 parameters, whose weights are",
        ),
        ({"num_hidden_layers": 10**9}, "which must be an integer from 1 to 10000"),
    ],
)
def test_a_hostile_config_json_is_refused(
    values: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("base/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    assert main(["finetune", *SMALL]) == 1
    assert words in capsys.readouterr().err


def test_a_hostile_config_json_is_refused_by_pretrain(monkeypatch: pytest.MonkeyPatch) -> None:
    config = given(monkeypatch)
    path = Path("base/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 10**9}))
    config.model.ffn_hidden_size = 10**9
    with pytest.raises(
        OnstepError, match=r"model\.ffn_hidden_size=1000000000.* make a model of [0-9,]+ parameters, whose weights are"
    ):
        pretrain(config)


TEMPLATES = [
    ("{{ 'x' * 10 ** 10 }}", "the tokenizer's chat template needs more than 512 MiB of memory for one conversation"),
    ("{{ 'x' * 10 ** 7 }}", "yields 10,000,000 characters for one conversation; the limit is 8,388,608"),
    ("{{ 1 / 0 }}", "the tokenizer's chat template rejects the messages: ZeroDivisionError: division by zero"),
    pytest.param(
        (
            "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}",
            "the tokenizer's chat template needs more than 5 seconds of CPU time for one conversation, the limit",
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.fixture
def own_template(request: pytest.FixtureRequest) -> str:
    """Gives base/ a tokenizer of transformers with a chat template; the words of the error."""
    template, words = request.param
    Path("a.txt").write_text("What is it? It is what it is.\n" * 30)
    source = tokenizer_source(DatasetConfig(paths=["a.txt"]))
    learn_bpe(source, 260, Path("cache"), show_progress=False).save(Path("base"))
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = template
    tokenizer.save_pretrained("base")
    path = Path("base/tokenizer_config.json")
    settings = json.loads(path.read_text())
    settings.pop("onstep_tokenizer_type", None)
    path.write_text(json.dumps(settings))
    return str(words)


@pytest.mark.parametrize("own_template", TEMPLATES, indirect=True)
def test_a_hostile_chat_template_ends_with_an_error(own_template: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", *SMALL]) == 1
    said = capsys.readouterr().err
    assert "chat.jsonl:1: the tokenizer's chat template" in said
    assert own_template in said


@pytest.mark.parametrize("own_template", TEMPLATES[:1], indirect=True)
def test_a_hostile_chat_template_ends_pretrain_with_an_error(
    own_template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = given(monkeypatch)
    with pytest.raises(DataError, match=own_template):
        pretrain(config)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"messages": ' + "[" * 5000 + "]" * 5000 + "}", "nested more than 100 levels deep"),
        ('{"prompt": "' + "x" * (64 << 20) + '"}', "a line of more than 67,108,864 bytes, the limit"),
    ],
    ids=["deep", "long"],
)
def test_a_hostile_line_is_named(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("chat.jsonl").open("a") as file:
        file.write("\n" + line)
    assert main(["finetune", *SMALL]) == 1
    said = capsys.readouterr().err
    assert "chat.jsonl:61 is" in said
    assert words in said
