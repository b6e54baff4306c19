"""FLOPs of a step: against the operations that torch really does, and against the formula by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onstep.config.parts import ModelConfig
from onstep.errors import ConfigError
from onstep.metrics import MFU_DEFINITION, model_flops_utilization, num_floating_point_operations
from onstep.metrics.model_shape import ModelShape
from onstep.models import build_transformer

DENSE = ModelConfig(num_layers=3, hidden_size=48, num_attention_heads=4, vocab_size=96, seq_length=32)
GROUPED = ModelConfig(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=16,
    ffn_hidden_size=80,
    vocab_size=50,
    seq_length=24,
    share_embeddings_and_output_weights=True,
    add_qkv_bias=True,
)


@dataclass
class MegatronModel:
    """The fields of a model's configuration that a `ModelConfig` does not have yet, with Megatron's names."""

    num_layers: int = 4
    hidden_size: int = 8
    num_attention_heads: int = 2
    num_query_groups: int | None = None
    kv_channels: int | None = None
    ffn_hidden_size: int = 16
    vocab_size: int = 10
    make_vocab_size_divisible_by: int = 8
    tensor_model_parallel_size: int = 2
    seq_length: int = 4
    gated_linear_unit: bool = False
    num_moe_experts: int | None = None
    moe_layer_freq: int | list[int] = 1
    moe_ffn_hidden_size: int | None = None
    moe_router_topk: int = 2
    moe_shared_expert_intermediate_size: int | None = None
    mtp_num_layers: int | None = None
    attention_output_gate: bool = False
    multi_latent_attention: bool = False
    is_hybrid_model: bool = False


def counted(config: ModelConfig, batch_size: int) -> int:
    """Matrix products of a forward and a backward pass, of which torch counts causal attention whole."""
    model = build_transformer(config, seed=0)
    tokens = torch.randint(config.vocab_size or 0, (batch_size, config.seq_length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, reduction="sum").backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("config", [DENSE, GROUPED], ids=["dense", "grouped"])
def test_flops_are_those_that_torch_counts_but_for_half_of_the_attention(config: ModelConfig) -> None:
    batch_size = 3
    shape = ModelShape.of(config)
    assert shape is not None
    tokens = batch_size * config.seq_length
    masked_half = 6 * config.num_layers * shape.query_width * config.seq_length * tokens
    assert masked_half > 0
    assert num_floating_point_operations(config, batch_size) + masked_half == counted(config, batch_size)


def test_flops_of_a_mixture_of_experts_follow_the_formula() -> None:
    model = MegatronModel(
        num_query_groups=1,
        num_moe_experts=4,
        moe_layer_freq=[0, 1, 1, 1],
        moe_ffn_hidden_size=6,
        moe_shared_expert_intermediate_size=5,
        mtp_num_layers=1,
        attention_output_gate=True,
    )
    h, q, d, g, s, vocab = 8, 8, 4, 1, 4, 16  # 10 rows, padded to a multiple of 8 * 2
    dense, moe, layers, two = 1, 4, 5, 2
    feed_forward = h * (16 * two * dense + 6 * 2 * two * moe + 5 * two * moe)
    attention = layers * (h * (q + 2 * d * g + q) + q * h + q * s)
    prediction, logits = 3 * h + 2 * h * h, 2 * h * vocab
    expected = 6 * (7 * s) * (feed_forward + attention + prediction + logits)
    assert num_floating_point_operations(model, 7) == expected


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, (True,) * 4), (2, (True, False, True, False)), (3, (True, False, False, True))]
)
def test_every_nth_layer_is_a_mixture_of_experts(frequency: int, expected: tuple[bool, ...]) -> None:
    shape = ModelShape.of(MegatronModel(num_moe_experts=4, moe_layer_freq=frequency))
    assert shape is not None
    assert shape.moe_layers == expected


def test_a_list_of_layers_must_have_one_entry_for_each() -> None:
    with pytest.raises(ConfigError, match=r"3 entries and the model 4 layers"):
        num_floating_point_operations(MegatronModel(num_moe_experts=4, moe_layer_freq=[1, 0, 1]), 1)


def test_packed_sequences_look_back_less_far() -> None:
    lengths = [5, 11, 16]
    whole = num_floating_point_operations(DENSE, 1, seq_length=32)
    packed = num_floating_point_operations(DENSE, 1, sum(lengths), sum(n * n for n in lengths), seq_length=32)
    attention_of_pairs = 6 * DENSE.num_layers * DENSE.hidden_size
    assert whole - packed == attention_of_pairs * (32**2 - sum(n * n for n in lengths))
    separately = [num_floating_point_operations(DENSE, 1, seq_length=n) for n in lengths]
    assert packed == pytest.approx(sum(separately), rel=1e-12)


@pytest.mark.parametrize("field", ["multi_latent_attention", "is_hybrid_model"])
def test_no_formula_is_no_flops(field: str) -> None:
    assert num_floating_point_operations(MegatronModel(**{field: True}), 8) == 0
    assert num_floating_point_operations(object(), 8) == 0


def test_flops_need_a_vocabulary() -> None:
    with pytest.raises(ConfigError, match="vocab_size is None"):
        num_floating_point_operations(ModelConfig(), 8)


def test_utilization_is_a_share_of_the_peak_and_absent_without_one() -> None:
    assert model_flops_utilization(4e14, 1e15) == pytest.approx(0.4)
    assert model_flops_utilization(4e14, None) is None
    assert "peak FLOP/s" in MFU_DEFINITION
