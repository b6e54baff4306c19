"""Runs of families of `transformers` that Onstep does not implement itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from onstep import finetune, pretrain
from onstep.cli.main import main
from onstep.config import ConfigContainer, apply_overrides
from onstep.errors import ConfigError, OnstepError
from onstep.models.generation.generate import generate
from onstep.models.hf.any_directory import load_directory
from onstep.models.hf.family_directory import family_config, save_causal_lm
from onstep.recipes import any_finetune_config
from tiny_families import family, write_data

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path)


def configuration(name: str, *words: str, peft: str | None = None) -> ConfigContainer:
    config = any_finetune_config(peft=peft)
    short = (
        "dataset.paths=[chat.jsonl] dataset.split=90,10,0 dataset.cache_dir=cache dataset.seq_length=64 "
        "model.seq_length=64 dataset.num_workers=0 train.num_epochs=null train.train_iters=2 train.global_batch_size=2 "
        "train.micro_batch_size=2 scheduler.lr_warmup_fraction=null validation.eval_iters=0 logger.log_interval=1 "
        "logger.console=quiet mixed_precision=null dist.device=cpu"
    )
    apply_overrides(config, [f"run.name={name}", *short.split(), *words])
    return config


def weights(directory: str) -> dict[str, torch.Tensor]:
    return load_file(f"{directory}/model.safetensors")


def test_a_run_continues_from_its_checkpoint_without_the_directory() -> None:
    family(Path("base"), "mistral")
    for name in ("straight", "stopped"):
        until = ["train.train_iters=4"] if name == "straight" else []
        finetune(configuration(name, "model.hf_model=base", "scheduler.lr_decay_iters=4", *until))
    Path("base").rename("gone")
    words = ("tokenizer.tokenizer_type=huggingface", "tokenizer.tokenizer_model=gone")
    with pytest.raises(OnstepError):
        finetune(configuration("new", "model.hf_model=base", *words))
    Path("gone").rename("base")
    (Path("base") / "model.safetensors").unlink()
    longer = ("train.train_iters=4", "checkpoint.on_config_change=apply")
    finetune(configuration("stopped", "model.hf_model=base", "scheduler.lr_decay_iters=4", *longer))
    straight, stopped = weights("runs/straight/model"), weights("runs/stopped/model")
    assert all(torch.equal(straight[name], stopped[name]) for name in straight)


def test_lora_adapts_fused_projections_and_merges_them() -> None:
    family(Path("base"), "phi3")
    finetune(configuration("tuned", "model.hf_model=base", "optimizer.lr=0.01", peft="lora"))
    described = json.loads(Path("runs/tuned/adapter/adapter_config.json").read_text())
    assert described["target_modules"] == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    adapted: Any = AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32).eval()
    tokens = torch.randint(300, (1, 16))
    before = adapted(tokens).logits
    adapted.load_adapter("runs/tuned/adapter")
    merged: Any = AutoModelForCausalLM.from_pretrained("runs/tuned/model", dtype=torch.float32).eval()
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-5)
    assert (before - merged(tokens).logits).abs().max() > 1e-3


def test_new_weights_follow_from_the_seed() -> None:
    family(Path("base"), "olmo2")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        pretrain(
            configuration(
                name,
                "model.hf_model=base",
                "checkpoint.finetune=false",
                f"rng.seed={seed}",
                "rng.data_seed=1",
                "train.train_iters=1",
                "optimizer.lr=1e-9",
                "optimizer.min_lr=1e-9",
            )
        )
    a, b, c, base = (weights(place) for place in ("runs/a/model", "runs/b/model", "runs/c/model", "base"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(a[name], b[name])
    assert not torch.allclose(a[name], c[name], atol=1e-3)
    assert not torch.allclose(a[name], base[name], atol=1e-3)


def test_a_directory_without_weights_is_trained_exported_and_continues_a_prompt(
    capsys: pytest.CaptureFixture[str],
) -> None:
    family(Path("base"), "falcon")
    (Path("base") / "model.safetensors").unlink()
    small = (
        "dataset.paths=[text.txt] dataset.split=90,10,0 dataset.cache_dir=cache dataset.num_workers=0 "
        "train.train_iters=1 train.global_batch_size=2 validation.eval_iters=0 mixed_precision=null dist.device=cpu "
        "dataset.seq_length=32 dataset.reset_attention_mask=true"
    )
    assert main(["train", "--hf-model", "base", "run.name=mine", *small.split(), "-q"]) == 0
    assert "base has no weights (*.safetensors): training starts from new ones" in capsys.readouterr().err
    assert main(["checkpoint", "export", "mine", "out", "--format", "hf"]) == 0
    exported, final = weights("out"), weights("runs/mine/model")
    assert all(torch.equal(exported[name], final[name]) for name in final)
    assert type(AutoModelForCausalLM.from_pretrained("out")).__name__ == "FalconForCausalLM"
    capsys.readouterr()
    assert main(["generate", "mine", "All work", "--max-new-tokens", "4", "--temperature", "0"]) == 0
    tokenizer: Any = AutoTokenizer.from_pretrained("out")
    ids = tokenizer("All work", return_tensors="pt")["input_ids"]
    model: Any = AutoModelForCausalLM.from_pretrained("out")
    text = tokenizer.decode(model.generate(ids, max_new_tokens=4, do_sample=False)[0], skip_special_tokens=True)
    assert capsys.readouterr().out.strip() == text.strip()
    assert main(["checkpoint", "export", "mine", "out.gguf"]) == 1
    assert "cannot write GGUF for a model of the type falcon" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["mamba", "gemma2"])
def test_states_and_keys_are_kept_while_generating(name: str) -> None:
    family(Path("base"), name)
    model = load_directory("base").eval()
    text = torch.randint(1, 300, (2, 6))
    found = generate(model, text, max_new_tokens=8, temperature=0.0)
    with torch.no_grad():
        for _ in range(8):
            text = torch.cat([text, model(text)[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    assert found.tolist() == text.tolist()


def test_the_losses_of_a_router_are_trained_on_as_in_transformers() -> None:
    theirs = family(Path("base"), "mixtral").train()
    model = load_directory("base").train()
    tokens, labels = torch.randint(300, (2, 16)), torch.randint(300, (2, 16))
    expected = theirs(input_ids=tokens, labels=labels, shift_labels=labels).loss
    assert expected.item() == pytest.approx(model(tokens, labels, reduction="sum").item() / labels.numel(), abs=1e-5)
    assert model(tokens, labels).sum().item() / labels.numel() == pytest.approx(expected.item(), abs=1e-5)
    model.eval()
    assert abs(model(tokens, labels, reduction="sum").item() / labels.numel() - expected.item()) > 1e-4


def test_an_export_keeps_what_ends_a_text_and_is_complete_or_absent() -> None:
    family(Path("base"), "cohere")
    (Path("base") / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 4], "top_k": 7}))
    save_causal_lm(load_directory("base"), "out")
    save_causal_lm(load_directory("base"), "out")
    assert json.loads(Path("out/generation_config.json").read_text())["eos_token_id"] == [0, 4]
    assert sorted(path.name for path in Path().glob("out*")) == ["out"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "mistrall"}, "'mistrall', for which transformers .* has no causal .* mean .*mistral"),
        (
            {"model_type": "x", "auto_map": {"AutoModelForCausalLM": "a.B"}},
            r"let it run: model\.trust_remote",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "'fp8'.*: its weights are quantized"),
        ({"num_attention_heads": "many"}, "does not describe a model of type mistral"),
    ],
)
def test_a_config_that_cannot_be_built_is_one_line(values: dict[str, Any], message: str) -> None:
    content = {"model_type": "mistral", "hidden_size": 32, **values}
    Path("config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message) as caught:
        family_config(".")
    assert "\n" not in str(caught.value)


def test_options_of_our_own_model_are_refused() -> None:
    family(Path("base"), "stablelm")
    with pytest.raises(ConfigError, match=r"model\.num_moe_experts=4 is an option of Onstep's own model"):
        finetune(configuration("mine", "model.hf_model=base", "model.num_moe_experts=4"))


def test_weights_of_another_model_are_refused() -> None:
    family(Path("base"), "granite")
    config = json.loads((Path("base") / "config.json").read_text())
    (Path("base") / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(OnstepError, match=r"with a different shape|cannot load"):
        finetune(configuration("mine", "model.hf_model=base"))


@pytest.mark.slow
def test_the_table_of_families() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "families.py"), "--short"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same bits") == 3
