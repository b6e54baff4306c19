"""The memory of models of `transformers`, from traces of a few of their layers."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Gemma3TextConfig, MistralConfig, MixtralConfig, PreTrainedConfig

from onstep.config import ConfigContainer, ModelConfig
from onstep.training.setup import family_memory
from onstep.training.setup.family_memory import TracedMemory

SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 50}
MODELS = {
    "alike": MistralConfig(num_hidden_layers=5, num_key_value_heads=1, **SIZES),
    "of two kinds": Gemma3TextConfig(
        num_hidden_layers=12,
        num_key_value_heads=1,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"] * 6,
        **SIZES,
    ),
}


def config_of(model: PreTrainedConfig, **values: Any) -> ConfigContainer:
    content = {**model.to_dict(), "model_type": model.model_type}
    config = ConfigContainer(model=ModelConfig(hf_config=content, vocab_size=50, seq_length=32, **values))
    config.train.micro_batch_size = 2
    return config


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("options", ["bf16_mixed", "lora", "recomputed"])
@pytest.mark.slow
def test_what_a_few_layers_say_is_what_the_whole_model_requires(
    model: str, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recompute = {"recompute_granularity": "full", "recompute_interval": 2} if options == "recomputed" else {}
    config = config_of(MODELS[model], **recompute)
    config.mixed_precision = "bf16_mixed"
    config.peft.peft_scheme = "lora" if options == "lora" else None
    by_layers = TracedMemory()(config)
    monkeypatch.setattr(family_memory, "repeated_layers", lambda model: None)
    assert by_layers == TracedMemory()(config)


def test_what_changes_no_operation_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    build = family_memory.empty_model
    monkeypatch.setattr(family_memory, "empty_model", lambda model: built.append(1) or build(model))
    config, estimate = config_of(MODELS["alike"]), TracedMemory()
    before = estimate(config)
    config.optimizer.optimizer = "paged_adamw_8bit"
    config.model.offload_activations = True
    assert estimate(config).optimizer == 0 < before.optimizer
    assert len(built) == 1
    config.train.micro_batch_size = 4
    assert estimate(config).logits == 2 * before.logits
    assert len(built) == 2


def test_experts_in_float32_are_traced() -> None:
    model = MixtralConfig(num_hidden_layers=2, num_key_value_heads=1, num_local_experts=4, **SIZES)
    assert TracedMemory()(config_of(model)).activations > 0
