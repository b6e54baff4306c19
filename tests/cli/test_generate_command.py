"""`onstep generate` continues a text with whatever weights a run has."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Tokenizer

from onstep import Trainer, TrainingArguments
from onstep.cli.generation.trained import open_trained
from onstep.cli.main import main
from onstep.models import generate as continue_tokens
from onstep.models.generation.generate import Sampling
from tests.support.chat_directory import chat_directory
from tests.support.small_models import VOCABULARY, causal_rows, qwen
from tests.support.small_weights import llama

SMALL = [
    "train.train_iters=1",
    "scheduler.lr_warmup_iters=0",
    "train.global_batch_size=2",
    "model.seq_length=16",
    "dataset.seq_length=16",
    "dataset.paths=[a.txt]",
    "dataset.cache_dir=cache",
    "validation.eval_interval=null",
    "validation.eval_on_start=false",
    "checkpoint.save_interval=1",
    "dist.device=cpu",
    "run.name=run",
]
GENERATE = ["generate", "runs/run"]
ASKED = ["--max-new-tokens=6", "--temperature=0"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("row, row, row your boat\n" * 40)


def test_a_run_without_final_weights_is_continued_from_its_newest_checkpoint(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", "--recipe", "tiny_moe", "model.num_layers=1", *SMALL]) == 0
    capsys.readouterr()
    assert main([*GENERATE, "row", *ASKED]) == 0
    of_model = capsys.readouterr().out
    shutil.rmtree("runs/run/model")  # which every finished run of the recipe has
    assert main([*GENERATE, "row", *ASKED]) == 0
    assert capsys.readouterr().out == of_model
    shutil.rmtree("runs/run/checkpoints")
    assert main([*GENERATE, "row", *ASKED]) == 1
    assert "runs/run has no weights: there is neither runs/run/model nor a checkpoint" in capsys.readouterr().err
    assert main(["generate", "runs", "row"]) == 1
    assert "there is no run 'runs'. Did you mean 'run'? Available: run." in capsys.readouterr().err


def test_learned_positions_do_not_limit_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.num_layers=1", "model.position_embedding_type=learned_absolute"]
    gpt2 = ["model.normalization=LayerNorm", "model.gated_linear_unit=false", "model.activation_func=gelu_tanh"]
    assert main(["train", "--recipe", "tiny_gpt", *words, *gpt2, *SMALL]) == 0
    capsys.readouterr()
    prompt = "row, row, row your boat"  # longer than the 16 positions
    assert main(["generate", "run", prompt, "--max-new-tokens=40", "--seed=1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(prompt)
    assert len(said.out) > len(prompt) + 10
    assert said.err == ""
    assert main(["generate", "run", prompt, "--rope-scaling=linear"]) == 1
    assert "requires rotary positions, and this model has position_embedding_type=learned_absolute" in (
        capsys.readouterr().err
    )


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["train", "--recipe", "tiny_gpt", "model.num_layers=1", *SMALL]) == 0
    capsys.readouterr()
    return "run"


def test_a_name_stands_for_the_run_below_runs(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for name in (run, "runs/run", str(Path("runs/run").absolute())):
        assert main(["generate", name, "row", *ASKED]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert main(["generate", "rum"]) == 1
    assert "there is no run 'rum'. Did you mean 'run'?" in capsys.readouterr().err


def test_a_text_appears_while_it_is_written(run: str) -> None:
    trained = open_trained(run)
    pieces = trained.pieces(trained.tokenizer.encode_text("row"), Sampling(), max_new_tokens=10**7, seed=1)
    first = list(itertools.islice(pieces, 5))  # of ten million tokens, which nobody waits for
    assert all(first)


def test_the_context_is_extended_where_asked(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*words: str) -> str:
        assert main(["generate", run, "row, row, row your boat", "--temperature=0", *words]) == 0
        return capsys.readouterr().out

    assert text("--rope-scaling=dynamic", "--rope-factor=4") != text()
    assert text("--rope-scaling=linear") != text()
    for words, message in {
        ("--rope-scaling=yarn",): "rope scaling must be one of linear, dynamic, got 'yarn'",
        ("--rope-scaling=linear", "--rope-factor=0.5"): "must be a finite number > 1, got 0.5",
    }.items():
        assert main(["generate", run, "row", *words]) == 1
        assert message in capsys.readouterr().err


def test_a_hugging_face_directory_is_continued_until_one_of_its_end_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    directory = Path("theirs")
    chat_directory(directory)
    words = ["generate", str(directory), "row your", "--temperature=0", "--max-new-tokens=12"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("row your")
    trained = open_trained(str(directory))
    start = torch.tensor([trained.tokenizer.encode_text("row your")])
    first = int(continue_tokens(trained.model, start, max_new_tokens=1, temperature=0)[0, -1])
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [first, 7]}))
    assert main(words) == 0
    assert capsys.readouterr().out == "row your\n"


@pytest.mark.parametrize("text", ['{"config": "cut', "[]", "{}", '{"config": 3}', '{"config": ' + "[" * 5000, "\ufeff"])
def test_a_damaged_record_is_an_error_with_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "run.json").write_text(text)
    assert main(["generate", str(tmp_path)]) == 1
    assert "run.json is not the record of a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "32"}, "config.json has hidden_size = '32', which must be an integer from 1"),
        ({"intermediate_size": 10**9}, "GB in float32), but the weights in runs/run/model have"),
        ({"model_type": {}}, "config.json has model_type {}, for which transformers"),
    ],
)
def test_a_damaged_config_json_is_an_error_with_a_remedy(
    capsys: pytest.CaptureFixture[str], values: dict[str, Any], words: str
) -> None:
    Path("runs/run").mkdir(parents=True)
    Path("runs/run/run.json").write_text('{"config": {}}')
    llama(Path("runs/run/model"))
    path = Path("runs/run/model/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    assert main([*GENERATE, "row", *ASKED]) == 1
    assert words in capsys.readouterr().err


def train_in(directory: str, *, has_tokenizer: bool = True, has_adapter: bool = False) -> None:
    """Two steps of a `Trainer` with a checkpoint of the last."""
    tokenizer = letters() if has_tokenizer else None
    model = qwen()
    if has_adapter:
        peft = pytest.importorskip("peft")
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    args = TrainingArguments(directory, use_cpu=True, max_steps=2, save_steps=2, report_to="none")
    Trainer(model, args, train_dataset=causal_rows(8), processing_class=tokenizer, default_callbacks=False).train()


def letters() -> Qwen2Tokenizer:
    """A token for each letter, and the end of the text, which pads too."""
    return Qwen2Tokenizer(vocab={chr(ord("a") + number): number for number in range(VOCABULARY - 1)}, merges=[])


def test_the_output_dir_of_a_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own tokenizer, and transformers' tokens; an interrupted run is continued from its newest checkpoint."""
    train_in("out")
    capsys.readouterr()
    assert main(["generate", "out", "de", *ASKED]) == 0
    printed = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained("out")
    ids = model.generate(torch.tensor([[3, 4]]), max_new_tokens=6, do_sample=False, pad_token_id=0)[0]
    assert printed.strip() == letters().decode(ids, skip_special_tokens=True)
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json"):
        Path("out", name).unlink()
    assert main(["generate", "out", "de", *ASKED]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"has_tokenizer": False}, "out has no tokenizer, since its Trainer had no processing_class"),
        ({"has_adapter": True}, "out has the weights of an adapter, not of a whole model; generate with peft"),
    ],
    ids=str,
)
def test_an_output_dir_without_what_generation_requires_is_refused(
    capsys: pytest.CaptureFixture[str], options: dict[str, bool], message: str
) -> None:
    train_in("out", **options)
    assert main(["generate", "out", "d", *ASKED]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("--top-k=0", "--top-k must be >= 1, got 0; drop the option for no restriction."),
        ("--top-p=2", "--top-p must be in (0, 1], got 2.0; write --top-p=1 for no restriction."),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_limit_that_cannot_be_is_refused_by_its_option(
    command: str, option: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "nowhere", option]) == 1
    assert capsys.readouterr().err == f"error: {rule}\n"
