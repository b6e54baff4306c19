"""`onstep memory`: what would make a training fit a GPU, and the estimate beside a measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import MistralConfig, MistralForCausalLM

from onstep.cli.main import main

SMALL = ("model.num_layers=1", "model.hidden_size=32", "model.num_attention_heads=2", "dist.device=cpu")
EXACT = ("weights, trained", "gradients", "optimizer state", "16-bit copies", "logits and loss")


def test_the_changes_that_make_it_fit_are_listed_with_their_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "qwen25_500m", "train.micro_batch_size=4", "--gpu-gb", "24"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("To fit 24 GB, from cheap to dear:")
    assert lines[start + 1].startswith("  train.micro_batch_size=2 (")
    assert len({line.split("=")[0] for line in lines[start + 1 :]}) == 3
    assert all(" GiB" in line for line in lines[start + 1 :])


@pytest.mark.parametrize(
    ("words", "kind", "apart"),
    [
        (["mixed_precision=bf16_mixed"], "16-bit copies", 0.05),
        (["ddp.use_distributed_optimizer=true", "ddp.fp8_param_gather=true"], "masters", 0.15),
    ],
    ids=["bf16", "MXFP8"],  # which quantizes all of so small a model at once
)
def test_measurement_and_estimate_are_equal_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    kind: str,
    apart: float,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "tiny_gpt", *SMALL, *words, "--measure"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("ESTIMATE") :]
    ratios = {line[:16].strip(): line.split()[-1] for line in table.splitlines()[1:] if "MiB" in line}
    exact = {*EXACT, kind} - ({"16-bit copies"} if kind == "masters" else set())
    assert {name: ratios[name] for name in exact} == dict.fromkeys(exact, "1.0000")
    assert float(ratios["activations"]) == pytest.approx(1, abs=1e-3)
    assert float(ratios["total"]) == pytest.approx(1, abs=apart)
    assert "Resident memory of the process: " in table
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_any_family_is_built_from_its_config_json_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values = {"model_type": "mistral", "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps({**values, **sizes}))
    words = ["--hf-model", str(tmp_path), "dist.device=cpu", "mixed_precision=bf16_mixed", "train.micro_batch_size=2"]
    assert main(["memory", *words, "--measure"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("ESTIMATE") :]
    ratios = {line[:16].strip(): line.split()[-1] for line in table.splitlines()[1:] if "MiB" in line}
    for name in (*EXACT, "activations"):
        assert float(ratios[name]) == pytest.approx(1, abs=2e-3), name
    assert main(["memory", *words, "model.offload_activations=true"]) == 0
    kept = {line[:16].strip(): float(line[16:].split()[0]) for line in out.splitlines() if line.endswith("MiB")}
    offloaded = capsys.readouterr().out.splitlines()
    on_host = next(float(line[16:].split()[0]) for line in offloaded if line.startswith("on the host"))
    assert 0.5 * kept["activations"] < on_host < kept["activations"]


def test_lora_of_any_family_is_estimated_before_its_weights_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    MistralForCausalLM(MistralConfig(num_key_value_heads=2, vocab_size=300, **sizes)).save_pretrained(tmp_path)
    lengths = ("model.seq_length=64", "dataset.seq_length=64", "train.micro_batch_size=2")
    words = ["--hf-model", str(tmp_path), "dist.device=cpu", "mixed_precision=bf16_mixed", *lengths]
    assert main(["memory", *words, "peft.peft_scheme=lora", "--measure"]) == 0
    out = capsys.readouterr().out
    table = out[out.index("ESTIMATE") :]
    ratios = {line[:16].strip(): line.split()[-1] for line in table.splitlines()[1:] if "MiB" in line}
    for name in (*EXACT, "weights, frozen", "activations"):
        assert float(ratios[name]) == pytest.approx(1, abs=2e-3), name


def test_a_directory_without_config_json_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["memory", "--hf-model", str(tmp_path)]) == 1
    assert "has no config.json; pass the directory of a Hugging Face model" in capsys.readouterr().err
