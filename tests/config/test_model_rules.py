"""Sizes and options of a model that do not go together are refused before anything is built."""

from __future__ import annotations

import re
from typing import Any

import pytest

from onstep.config import ConfigContainer, ModelConfig, apply_overrides, resolve, validate
from onstep.config.checks.model import check_model
from onstep.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def broken(**options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_model(ModelConfig(**options))
    return str(caught.value)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "default"},
        {"type": "linear", "factor": 1},
        {"rope_type": "dynamic", "factor": 2.0},
        YARN,
        YARN | {"attention_factor": 1.0, "beta_fast": 32, "truncate": False},
        LLAMA3,
    ],
)
def test_scalings_with_their_numbers_pass(scaling: dict[str, Any] | None) -> None:
    check_model(ModelConfig(rope_scaling=scaling))


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "liner", "factor": 2.0}, "rope_type 'liner', which must be default | linear | dynamic | yarn"),
        ({"rope_type": "liner", "factor": 2.0}, "Did you mean 'linear'"),
        ({"factor": 2.0}, "rope_type None, which must be"),
        ({"rope_type": "linear"}, "lacks factor; rope_type linear requires factor"),
        ({"rope_type": "yarn", "factor": 2.0}, "lacks original_max_position_embeddings"),
        ({"rope_type": "linear", "factor": 0.5}, "rope_scaling.factor must be a number >= 1"),
        ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor must be a number >= 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_scaling.factor must be a number >= 1"),
        ({"rope_type": "linear", "faktor": 2.0}, "'faktor', but rope_type linear accepts factor. Did you mean"),
        ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1.0}, "rope_theta=1.0; set model.rotary_base"),
        (LLAMA3 | {"high_freq_factor": 1.0}, "low_freq_factor=1.0 must be below high_freq_factor=1.0"),
        (LLAMA3 | {"low_freq_factor": -1.0}, "low_freq_factor must be a finite number > 0, got -1.0"),
        (YARN | {"beta_slow": 40}, "beta_slow=40 must be below beta_fast=32.0"),
        (YARN | {"beta_fast": True}, "beta_fast must be a finite number > 0, got True"),
    ],
)
def test_a_scaling_that_cannot_work_is_named(scaling: dict[str, Any], message: str) -> None:
    assert message in broken(rope_scaling=scaling)


def test_positions_that_are_not_rotary_have_no_scaling_and_no_even_heads() -> None:
    for kind in ("learned_absolute", "none"):
        message = broken(position_embedding_type=kind, rope_scaling={"rope_type": "linear", "factor": 2.0})
        assert f"position_embedding_type={kind} has none; set rope_scaling to null" in message
        check_model(ModelConfig(position_embedding_type=kind, kv_channels=7))
    assert "a head is 7, and rotary embeddings require an even width" in broken(kv_channels=7)
    assert "width 4 or more, got 2" in broken(kv_channels=2, rope_scaling={"rope_type": "dynamic", "factor": 2.0})


def run_with(*overrides: str) -> ConfigContainer:
    config = ConfigContainer()
    apply_overrides(config, ["train.train_iters=1", "train.micro_batch_size=1", "optimizer.lr=1e-3", *overrides])
    return config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.rope_scaling={rope_type: linear}", "lacks factor"),
        ("model.normalization=layernorm", "'layernorm' must be RMSNorm | LayerNorm. Did you mean 'LayerNorm'?"),
        ("model.activation_func=swiglu", "model.activation_func='swiglu' must be silu | gelu | gelu_tanh | relu"),
        ("model.position_embedding_type=learned", "Did you mean 'learned_absolute'?"),
        ("model.recompute_granularity=selective", "'selective' must be full"),
    ],
)
def test_a_run_is_refused_before_it_is_built(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        validate(run_with(override))


def test_the_width_of_a_block_follows_from_its_gate() -> None:
    assert resolve(run_with("model.hidden_size=128")).model.ffn_hidden_size == 384
    assert resolve(run_with("model.hidden_size=128", "model.gated_linear_unit=false")).model.ffn_hidden_size == 512
