"""QLoRA trains as the modules of bitsandbytes do by hand, continues exactly, and leaves what its parts compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils.integrations import dequantize_bnb_weight
from safetensors.torch import load_file
from transformers import BitsAndBytesConfig, MistralConfig, MistralForCausalLM

from onstep import finetune
from onstep.checkpoint import resolve
from onstep.cli.main import main
from onstep.config import ConfigContainer
from onstep.errors import OnstepError
from onstep.models import load_hf
from onstep.models.hf.by_layer import hf_weights_by_layer
from onstep.training.setup.lora import projections
from onstep.training.setup.pretrained import fill_from_pretrained
from onstep.training.setup.quantized_base import quantized_directory, quantized_model, weights_by_layer
from tests.support.forked_processes import Processes
from tests.support.jobs.finetune_jobs import small_finetune
from tests.support.lora_reference import base, by_hand, largest_difference, observed_run
from tests.support.small_weights import llama, tokens
from tests.support.whole_runs import Ranks, check_same

JOBS = "tests.support.jobs.finetune_jobs"
RUN = Path("runs/run")
KINDS = ("nf4", "int8")
SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing`:FutureWarning", "ignore:MatMul8bitLt:UserWarning"
)


@pytest.fixture(scope="module", autouse=True)
def imported(processes: Processes) -> None:
    processes.load("transformers.models.llama.modeling_llama", "accelerate", "peft", "bitsandbytes")


@pytest.fixture
def config(
    request: pytest.FixtureRequest, tmp_path: Path, corpus: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> ConfigContainer:
    """Four steps over a quantized base, in runs/run; the kind is the test's parameter."""
    monkeypatch.chdir(tmp_path)
    llama(tmp_path / "weights", attention_bias=True, mlp_bias=True)
    words = [f"peft.base_quantization={request.node.callspec.params['kind']}", "train.train_iters=4"]
    settings = {"weights": "weights", "corpus": str(corpus), "cache": str(token_cache), "peft": "lora", "words": words}
    return small_finetune(settings)


def theirs(kind: str) -> Any:
    options = (
        {"load_in_8bit": True}
        if kind == "int8"
        else {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": torch.float32,
        }
    )
    return base(quantization_config=BitsAndBytesConfig(**options), dtype=torch.float32, device_map="cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_losses_adapter_and_merge_are_those_of_the_module_by_hand(
    config: ConfigContainer, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = observed_run(config)
    by_module = theirs(kind)
    expected = by_hand(by_module, ours, 4)
    losses, adapter = largest_difference(ours, expected)
    with capsys.disabled():
        print(f"\n{kind}: losses within {losses:.1e}, adapter within {adapter:.1e} of bitsandbytes by hand")
    assert losses < 1e-5
    assert adapter < 1e-5
    merged = load_file(RUN / "model" / "model.safetensors")
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"):
        layer = by_module.base_model.model.get_submodule(name)
        inner = layer.get_base_layer()
        weight = dequantize_bnb_weight(inner.weight, state=getattr(inner.weight, "quant_state", None) or inner.state)
        torch.testing.assert_close(
            merged[f"{name}.weight"], weight + layer.get_delta_weight("default"), rtol=0, atol=2e-6
        )


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        ("nf4", "mistral"),
        pytest.param("nf4", "llama", marks=pytest.mark.slow),
        pytest.param("int8", "llama", marks=pytest.mark.slow),
        pytest.param("int8", "mistral", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_continues_exactly(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path, kind: str, family: str
) -> None:
    if family == "llama":
        llama(tmp_path / "weights", attention_bias=True, mlp_bias=True)
    else:
        MistralForCausalLM(MistralConfig(**SIZES)).save_pretrained(tmp_path / "weights")
    words = [f"peft.base_quantization={kind}", "mixed_precision=bf16_mixed", "optimizer.optimizer=adamw_8bit"]
    common = {"weights": str(tmp_path / "weights"), "corpus": str(corpus), "cache": str(token_cache), "peft": "lora"}
    ranks = Ranks(processes, tmp_path, JOBS, **common, words=words)
    expected = ranks.finish("whole", "finetune", ranks=1)
    assert expected["step"] == 9
    assert ranks.start("killed", "finetune", ranks=1, dies_at=6) == [-9]
    check_same(ranks.finish("killed", "finetune", ranks=1), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_is_generated_from_exported_and_fine_tuned_further(
    config: ConfigContainer, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.train.train_iters = 2
    finetune(config)
    assert main(["generate", str(RUN), "def ", "--max-new-tokens=4", "--seed=1"]) == 0
    assert main(["checkpoint", "export", str(RUN), "out"]) == 0
    found, merged = load_hf("out").state_dict(), load_hf(RUN / "model").state_dict()
    assert all(torch.equal(found[name], merged[name]) for name in merged)
    config = fill_from_pretrained(config)
    of_checkpoint = quantized_model(config, weights_by_layer(resolve(RUN)), str(RUN))
    with torch.no_grad():
        assert torch.equal(of_checkpoint(tokens()), quantized_directory(Path("out"), config)(tokens()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_is_loaded_after_the_model_was_used(config: ConfigContainer, kind: str) -> None:
    config = fill_from_pretrained(config)
    model, empty = quantized_directory(Path("weights"), config), quantized_model(config)
    with torch.no_grad():
        expected, zero = model.eval()(tokens()), empty.eval()(tokens())
        empty.load_state_dict(model.state_dict())
        found = empty(tokens())
    assert torch.equal(found, expected)
    assert not torch.equal(zero, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_hold_the_base_as_it_is_and_weights_are_read_by_layer(config: ConfigContainer, kind: str) -> None:
    config = fill_from_pretrained(config)
    parts = list(hf_weights_by_layer("weights", config.model))
    assert [len({name.split(".")[1] for name in part if name.startswith("layers.")}) for part in parts] == [0, 1, 1]
    model = quantized_directory(Path("weights"), config)
    names = projections(model)
    assert len(names) == 2 * 7
    for name in names:
        held, whole = (one.get_submodule(name).get_parameter("weight") for one in (model, load_hf("weights")))
        assert held.nbytes * (2 if kind == "nf4" else 1) == whole.numel()
    assert model.num_parameters() == load_hf("weights").num_parameters()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_another_model_are_refused(config: ConfigContainer, kind: str) -> None:
    config = fill_from_pretrained(config)
    parts = [
        {name: one for name, one in part.items() if "up" not in name}
        for part in hf_weights_by_layer("weights", config.model)
    ]
    with pytest.raises(OnstepError, match=r"weights lacks layers.0.feed_forward.up"):
        quantized_model(config, parts, "weights")
    parts[1]["layers.0.attention.query.weight"] = torch.zeros(3, 3)
    with pytest.raises(OnstepError, match=r"has layers.0.attention.query.weight of shape \(3, 3\)"):
        quantized_model(config, parts, "weights")
