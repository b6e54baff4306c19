import math

import pytest
import torch

from onstep.config import ModelConfig
from onstep.models import Transformer, build_transformer, init_weights

WIDE = ModelConfig(num_layers=8, hidden_size=128, vocab_size=300, add_qkv_bias=True, init_method_std=0.05)


def same_weights(first, second):
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == other and torch.equal(a, b) for (name, a), (other, b) in pairs)


@pytest.mark.parametrize("name", ["embedding", "output", "layers.3.attention.key", "layers.3.feed_forward.up"])
def test_embeddings_and_projections_are_normal_with_the_configured_spread(name):
    weight = build_transformer(WIDE, seed=1).get_submodule(name).weight

    assert weight.mean().item() == pytest.approx(0, abs=0.002)
    assert weight.std().item() == pytest.approx(0.05, rel=0.03)


@pytest.mark.parametrize("name", ["layers.0.attention.output", "layers.7.feed_forward.down"])
def test_residual_outputs_are_scaled_by_depth(name):
    weight = build_transformer(WIDE, seed=1).get_submodule(name).weight

    assert weight.std().item() == pytest.approx(0.05 / math.sqrt(16), rel=0.03)


def test_biases_start_at_zero_and_norms_at_one():
    model = build_transformer(WIDE, seed=1)

    assert model.layers[2].attention.query.bias.abs().max() == 0
    for norm in (model.layers[2].attention_norm, model.layers[2].feed_forward_norm, model.final_norm):
        assert torch.equal(norm.weight, torch.ones(128))


def test_a_seed_decides_the_weights_and_leaves_the_global_rng_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_transformer(WIDE, seed=1)

    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same_weights(first, build_transformer(WIDE, seed=1))
    assert not same_weights(first, build_transformer(WIDE, seed=2))


@pytest.mark.parametrize("build", [Transformer, build_transformer])
def test_without_a_seed_the_global_rng_decides(build):
    def built_after(seed):
        torch.manual_seed(seed)
        return build(WIDE)

    assert same_weights(built_after(3), built_after(3))
    assert not same_weights(built_after(3), built_after(4))


def test_drawn_weights_do_not_depend_on_the_dtype_of_the_model():
    model = build_transformer(WIDE, seed=1)
    low = build_transformer(WIDE, seed=9).bfloat16()

    init_weights(low, WIDE, torch.Generator().manual_seed(1))

    assert torch.equal(low.embedding.weight, model.embedding.weight.bfloat16())
