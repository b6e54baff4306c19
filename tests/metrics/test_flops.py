"""FLOPs of a step: against the operations that torch really does, and against the formula by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from onstep.config import ConfigContainer, ModelConfig
from onstep.errors import ConfigError
from onstep.metrics import MFU_DEFINITION, model_flops_utilization, num_floating_point_operations
from onstep.metrics.model_shape import ModelShape
from onstep.models import Transformer, build_transformer
from onstep.recipes import get_recipe
from onstep.training.setup.lora import add_lora

DENSE = ModelConfig(num_layers=3, hidden_size=48, num_attention_heads=4, vocab_size=96, seq_length=32)
GROUPED = replace(
    ModelConfig(num_layers=2, hidden_size=64, num_attention_heads=8, vocab_size=50, seq_length=24),
    num_query_groups=2, kv_channels=16, ffn_hidden_size=80, share_embeddings_and_output_weights=True, add_qkv_bias=True,
)  # fmt: skip
GPT = replace(
    DENSE, num_layers=2, normalization="LayerNorm", position_embedding_type="learned_absolute", gated_linear_unit=False,
    activation_func="gelu_tanh", add_bias_linear=True, add_qkv_bias=True,
)  # fmt: skip
NORMED_HEADS = replace(DENSE, qk_layernorm=True, num_query_groups=1, kv_channels=16)
EXPERTS = replace(
    DENSE,
    num_moe_experts=8,
    moe_ffn_hidden_size=24,
    moe_router_topk=3,
    moe_grouped_gemm=False,  # FlopCounterMode has no formula for the grouped product
)
SHARED_EXPERT = replace(
    EXPERTS, moe_layer_freq=[0, 1, 1], moe_shared_expert_intermediate_size=40, moe_shared_expert_gate=True
)
FURTHER_TOKENS = replace(DENSE, mtp_num_layers=2)


@dataclass
class MegatronModel:
    """A model's configuration of another library, with Megatron's names and fields that a `ModelConfig` has not."""

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
    return counted_of(build_transformer(config, seed=0), config, batch_size)


def counted_of(model: Transformer, config: ModelConfig, batch_size: int) -> int:
    tokens = torch.randint(config.vocab_size or 0, (batch_size, config.seq_length))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, labels=tokens, reduction="sum").backward()
    return counter.get_total_flops()


def left_out(config: ModelConfig, tokens: int) -> int:
    """What torch counts and the formula leaves out: the masked half of attention, the router, the shared expert's
    gate; less the norms that the formula has for multi-token prediction."""
    shape = ModelShape.of(config)
    assert shape is not None
    masked_half = 6 * shape.all_layers * shape.query_width * config.seq_length * tokens
    assert masked_half > 0
    router = 6 * shape.num_moe_layers * shape.hidden_size * (shape.num_experts + shape.shared_expert_gate) * tokens
    return masked_half + router - 6 * shape.mtp_depth * 3 * shape.hidden_size * tokens


@pytest.mark.parametrize(
    "config",
    [DENSE, GROUPED, GPT, NORMED_HEADS, EXPERTS, SHARED_EXPERT, FURTHER_TOKENS],
    ids=["dense", "grouped", "gpt", "normed-heads", "experts", "shared-expert", "further-tokens"],
)
def test_flops_are_those_that_torch_counts_within_what_is_left_out(config: ModelConfig) -> None:
    batch_size = 3
    expected = counted(config, batch_size) - left_out(config, batch_size * config.seq_length)
    assert num_floating_point_operations(config, batch_size) == expected


H, W, S, R = DENSE.hidden_size, 128, DENSE.seq_length, 4
"""Hidden size, width of the feed-forward block, sequence, rank."""

NOT_NEEDED = {
    "all": 3 * H * H + 3 * R * H,  # the gradient for the input of the first layer's query, key and value
    "query v_proj": 3 * H * H + 2 * R * H + S * H,  # and for its keys, behind which nothing is trained
    "down": 4 * H * H + 4 * S * H + 2 * H * W + W * H + R * W,  # and for all of that layer in front of its down matrix
}
"""Multiply-adds of a token that the formula counts and the first layer does not need, by what LoRA goes to."""


@pytest.mark.parametrize("targets", NOT_NEEDED)
def test_flops_of_lora_are_two_products_of_frozen_matrices_and_three_of_added_ones(targets: str) -> None:
    config = ConfigContainer(model=DENSE)
    config.peft.peft_scheme, config.peft.dim = "lora", R
    config.peft.target_modules = None if targets == "all" else targets.split()
    model = build_transformer(DENSE, seed=0)
    add_lora(model, config.peft, seed=0)
    tokens = 3 * S
    expected = counted_of(model, DENSE, 3) - left_out(DENSE, tokens) + 2 * tokens * NOT_NEEDED[targets]
    assert num_floating_point_operations(config, 3) == expected
    assert num_floating_point_operations(config, 3) < num_floating_point_operations(DENSE, 3)


@pytest.mark.parametrize("name", ["gpt2_124m", "llama32_1b", "qwen25_500m", "qwen25_7b"])
def test_flops_of_a_published_model_are_those_that_torch_counts_at_full_width(name: str) -> None:
    """Of two of its layers, which are all alike."""
    options = {"recompute_granularity": None, "chunked_loss": False}  # torch does not count an addmm in place
    config = replace(get_recipe(name)().model, num_layers=2, **options)
    with torch.device("meta"):
        model = Transformer(config).to("meta")  # the rotary tables too
        expected = counted_of(model, config, 1) - left_out(config, config.seq_length)
    assert num_floating_point_operations(config, 1) == expected


def test_flops_of_qwen3_30b_a3b_follow_by_hand() -> None:
    attention = 2048 * 4096 + 2 * 2048 * 512 + 4096 * 2048
    scores = 4096 * 4096  # 4,096 tokens back at half, twice, in 32 heads of 128
    experts = 8 * 3 * 2048 * 768
    expected = 6 * 4096 * (48 * (attention + scores + experts) + 2048 * 151_936)
    assert num_floating_point_operations(get_recipe("qwen3_30b_a3b")(), 1) == expected


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
    with pytest.raises(ConfigError, match=r"3 entries, but the model has 4 layers"):
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
