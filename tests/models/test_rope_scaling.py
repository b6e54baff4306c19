import copy

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from onstep.models.layers.rotary import RotaryTables

WIDTH, LENGTH = 16, 64
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "linear by its old name": {"type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn with a factor of its own": YARN | {"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with mscale": YARN | {"mscale": 1.2, "mscale_all_dim": 0.7},
    "yarn with the whole ramp": YARN | {"truncate": False},
}


def of_transformers(scaling, positions):
    config = LlamaConfig(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_theta": 500.0} | copy.deepcopy(scaling or {"rope_type": "default"}),
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    return cos[..., : WIDTH // 2], sin[..., : WIDTH // 2]


def ours(scaling):
    return RotaryTables(WIDTH, 500.0, LENGTH, scaling)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [20, LENGTH, 150])
def test_cosines_and_sines_are_those_of_transformers(name, length):
    expected = of_transformers(SCALINGS[name], torch.arange(length)[None])

    found = ours(SCALINGS[name])(0, length)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, 0], other[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCALINGS)
def test_given_positions_have_the_angles_of_transformers(name):
    positions = torch.tensor([[5, 0, 63, 7], [1, 1, 2, 40]])
    expected = of_transformers(SCALINGS[name], positions)

    found = ours(SCALINGS[name]).at(positions)

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.squeeze(2), other, rtol=0, atol=1e-6)


def test_scaled_tables_stay_exact_through_low_precision():
    for name, scaling in SCALINGS.items():
        moved = ours(scaling).bfloat16()
        assert torch.equal(moved(0, 100)[0], ours(scaling)(0, 100)[0]), name
        assert torch.equal(moved.at(torch.arange(9)[None])[1], ours(scaling).at(torch.arange(9)[None])[1]), name


def test_yarn_turns_longer_vectors():
    cos, sin = ours(YARN)(3, 1)

    # 0.1 ln(4) + 1
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, 1.1386294361119891**2))
