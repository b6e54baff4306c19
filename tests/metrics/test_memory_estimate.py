"""The estimate of a training's memory: exact for weights, gradients and optimizer, near the truth for activations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from onstep.config import ConfigContainer, ModelConfig
from onstep.metrics import estimate_training_memory, format_training_memory_estimate
from onstep.models import Transformer, build_transformer
from onstep.optim import build_optimizer
from onstep.training.setup.lora import add_lora

SIZES = {"hidden_size": 128, "ffn_hidden_size": 512, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 128}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


def config_of(precision: str | None = None, **model: Any) -> ConfigContainer:
    config = ConfigContainer(model=ModelConfig(**{"num_layers": 2, **SIZES, **model}), mixed_precision=precision)
    config.train.micro_batch_size, config.optimizer.lr = 2, 1e-3
    return config


def held(config: ConfigContainer) -> int:
    """Bytes of weights, gradients and optimizer state after a step."""
    model = build_transformer(config.model, seed=0)
    if config.peft.peft_scheme is not None:
        add_lora(model, config.peft, seed=0)
    optimizer = build_optimizer([model], config.optimizer)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    model(tokens, tokens, reduction="sum").backward()
    optimizer.step()
    inner = optimizer.state_dict()
    state = [value for one in inner["state"].values() for value in one.values()]
    tensors = [value for value in state if isinstance(value, torch.Tensor) and value.numel() > 1]
    tensors += [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    return sum(tensor.nbytes for tensor in tensors)


def kept_by_layers(config: ConfigContainer) -> int:
    """Bytes that two layers more keep for the backward pass, without weights and their copies."""

    def kept(num_layers: int) -> int:
        model = Transformer(replace(config.model, num_layers=num_layers))
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        storages: dict[int, int] = {}
        alive = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            alive.append(tensor)
            if tensor.untyped_storage().data_ptr() not in weights:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.zeros(2, SIZES["seq_length"], dtype=torch.int64)
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=config.mixed_precision is not None)
        with autocast, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(tokens, labels=tokens, reduction="sum")
        return sum(storages.values())

    return kept(4) - kept(2)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
@pytest.mark.parametrize("scheme", [None, "lora"])
@pytest.mark.parametrize("options", [{}, EXPERTS], ids=["dense", "experts"])
def test_weights_gradients_and_optimizer_are_what_a_step_leaves(
    optimizer: str, scheme: str | None, options: dict[str, Any]
) -> None:
    config = config_of(**options)
    config.optimizer.optimizer, config.peft.peft_scheme = optimizer, scheme
    estimate = estimate_training_memory(config)
    assert estimate is not None
    assert estimate.weights_and_optimizer == held(config)
    assert (estimate.num_trainable < estimate.num_parameters) == (scheme == "lora")


@pytest.mark.parametrize("precision", [None, "bf16_mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_query_groups": 1},
        {"ffn_hidden_size": 1024},
        {"gated_linear_unit": False, "activation_func": "gelu"},
        EXPERTS,
    ],
    ids=["dense", "grouped", "wide", "not-gated", "experts"],
)
def test_activations_of_layers_are_within_a_seventh_of_what_is_kept(
    precision: str | None, options: dict[str, Any]
) -> None:
    config = config_of(precision, **options)
    two, four = (estimate_training_memory(config_of(precision, **options, num_layers=n)) for n in (2, 4))
    assert two is not None
    assert four is not None
    kept = kept_by_layers(config)
    copies = four.weight_copies - two.weight_copies  # made under autocast, and kept as well
    assert four.activations - two.activations + copies == pytest.approx(kept, rel=1 / 7)


def test_recomputed_layers_keep_their_input_only() -> None:
    whole, recomputed = (
        [estimate_training_memory(config_of(recompute_granularity=how, num_layers=n)) for n in (8, 9)]
        for how in (None, "full")
    )
    tokens = 2 * SIZES["seq_length"]
    assert whole[0] is not None
    assert recomputed[0] is not None
    assert recomputed[1] is not None
    assert recomputed[1].activations - recomputed[0].activations == tokens * 4 * SIZES["hidden_size"]
    assert recomputed[0].activations < whole[0].activations / 3
    assert recomputed[0].weights_and_optimizer == whole[0].weights_and_optimizer


def test_activations_grow_with_the_micro_batch_and_nothing_else_does() -> None:
    config = config_of("bf16_mixed")
    one = estimate_training_memory(config)
    config.train.micro_batch_size = 6
    three = estimate_training_memory(config)
    assert one is not None
    assert three is not None
    assert three.activations == 3 * one.activations
    assert three.total - three.activations == one.total - one.activations


def test_the_table_has_a_line_for_each_part_that_there_is() -> None:
    config = config_of("bf16_mixed")
    config.peft.peft_scheme = "lora"
    estimate = estimate_training_memory(config)
    assert estimate is not None
    lines = format_training_memory_estimate(estimate).splitlines()
    names = ["parameters", "trained", "weights", "gradients", "optimizer", "16-bit copies", "activations", "total"]
    assert [line[:14].strip() for line in lines] == names
    parts = [float(line.split()[-2].replace(",", "")) for line in lines[2:]]
    assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.3)
