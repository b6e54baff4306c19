"""`onstep recipes` and `onstep memory`, as a user meets them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from onstep.cli.main import COMMANDS, main
from onstep.cli.memory import fits
from onstep.cli.recipes import BYTE_VOCABULARY
from onstep.config import from_dict, load_yaml, parse_yaml
from onstep.data import build_tokenizer
from onstep.metrics import estimate_training_memory
from onstep.recipes import RECIPES, get_recipe
from tests.support.small_weights import llama


@pytest.fixture(autouse=True)
def _lines_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main([*words]) == code
    out, err = capsys.readouterr()
    return out + err


def test_the_list_has_sizes_and_what_each_recipe_is(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "recipes", "list").splitlines()
    rows = {line.split()[0]: line.split() for line in lines[1:] if line}
    assert rows["qwen3_30b_a3b"][1:4] == ["30.5G", "3.35G", "23G"]
    assert rows["gpt2_124m"][1:4] == ["124M", "124M", "798M"]
    assert " ".join(rows["tiny_gpt"][4:]).startswith("About a million parameters")
    assert lines[-1].startswith("Each is also available as NAME_finetune")
    every = said(capsys, "recipes", "list", "--all")
    assert all(f"\n{name} " in every for name in RECIPES)


def test_the_list_and_the_help_do_not_wait_for_torch() -> None:
    code = "import sys; from onstep.cli.main import main; main({0}); assert 'torch' not in sys.modules"
    for words in (["recipes", "list"], ["memory", "qwen25_7b"], ["--help"]):
        subprocess.run([sys.executable, "-c", code.format(words)], check=True, capture_output=True)


@pytest.mark.parametrize("name", ["tiny_gpt", "tiny_gpt_finetune_lora", "llama32_1b", "qwen3_30b_a3b_pretrain_config"])
def test_the_yaml_is_the_recipe(capsys: pytest.CaptureFixture[str], name: str) -> None:
    text = said(capsys, "recipes", "show", name, "--format", "yaml")
    assert from_dict(parse_yaml(text)) == get_recipe(name)()


def test_train_takes_the_yaml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(said(capsys, "recipes", "show", "qwen25_3b", "--format", "yaml"))
    shown = said(capsys, "config", "show", str(file), "--as-written")
    assert parse_yaml(shown) == load_yaml(file)


def test_the_text_says_what_differs_from_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "recipes", "show", "llama32_1b").splitlines()
    assert lines[0].startswith("llama32_1b: Llama-3.2-1B from scratch")
    assert "1.24G parameters, 1.24G active per token; 8.22G FLOPs per token" in lines
    assert "model.rotary_base=500000.0" in lines
    assert not any(line.startswith("rng.seed") for line in lines)


@pytest.mark.parametrize(
    ("words", "problem"), [(("recipes", "show"), "unknown recipe 'qwen25_50m'"), (("memory",), "nor a run or a recipe")]
)
def test_a_mistyped_recipe_is_reported_with_the_nearest(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    assert f"{problem}. Did you mean 'qwen25_500m'?" in said(capsys, *words, "qwen25_50m", code=1)


def test_a_mistyped_command_is_reported_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'recipes'?" in said(capsys, "recipe", code=1)
    assert {"recipes", "memory", "finetune"} <= COMMANDS.keys()


def test_the_vocabulary_of_bytes_is_the_tokenizers() -> None:
    assert build_tokenizer(get_recipe("tiny_gpt")().tokenizer).vocab_size == BYTE_VOCABULARY


def test_memory_is_the_estimate_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "memory", "qwen25_500m").splitlines()
    estimate = estimate_training_memory(get_recipe("qwen25_500m")())
    assert estimate is not None
    table = {line[:16].strip(): line[16:].split() for line in lines[:9]}
    assert table["parameters"] == ["494,032,768"]
    assert table["weights, trained"] == [f"{4 * 494_032_768 / 2**20:,.1f}", "MiB"]
    assert table["total"] == [f"{estimate.total / 2**20:,.1f}", "MiB"]
    assert lines[-2] == "Per device, for a micro-batch of 1 x 4,096 tokens in bf16_mixed, optimizer adam."
    assert lines[-1] == "It fits a GPU with 24 GB, leaving 10% for the allocator and the kernels."


def test_memory_follows_the_values_that_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    def total(*words: str) -> float:
        text = said(capsys, "memory", *words)
        return float(next(line for line in text.splitlines() if line.startswith("total")).split()[1].replace(",", ""))

    whole = total("qwen25_7b")
    assert total("qwen25_7b", "train.micro_batch_size=2") > whole
    assert total("qwen25_7b", "model.recompute_granularity=null") > whole
    assert total("qwen25_7b_finetune_lora") < whole / 2
    assert total("qwen25_7b", "optimizer.optimizer=muon") < whole
    assert total("tiny_gpt", "--ranks", "8") < total("tiny_gpt")
    assert "with full recomputation" in said(capsys, "memory", "qwen25_7b")


def test_memory_takes_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("run: {recipe: qwen25_500m}\nmodel: {num_layers: 12}\n")
    assert said(capsys, "memory", str(file)) == said(capsys, "memory", "qwen25_500m", "model.num_layers=12")


def test_memory_refuses_what_training_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert "must be a multiple of num_query_groups=5" in said(
        capsys, "memory", "qwen25_500m", "model.num_query_groups=5", code=1
    )


def test_memory_of_any_model_takes_its_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("any_finetune", "any_finetune_lora"):
        text = said(capsys, "memory", name, code=1)
        assert f"{name} reads its model from the pretrained weights; set checkpoint.pretrained_checkpoint=DIR" in text
    assert "does not exist" in said(capsys, "memory", "any_finetune", "checkpoint.pretrained_checkpoint=gone", code=1)
    model = llama(tmp_path)
    lines = said(capsys, "memory", "any_finetune", f"checkpoint.pretrained_checkpoint={tmp_path}").splitlines()
    assert lines[0].split() == ["parameters", f"{sum(weight.numel() for weight in model.parameters()):,}"]


def test_a_model_that_no_gpu_holds_is_reported() -> None:
    estimate = estimate_training_memory(get_recipe("qwen3_30b_a3b")())
    assert estimate is not None
    assert fits(estimate).startswith("It does not fit a single GPU of up to 288 GB")
