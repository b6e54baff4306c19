"""A model that continues a text beyond the length it was trained on stays as good as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import Transformer, build_transformer, generate
from onstep.models.generation.context_window import context_length, extend_context, token_losses

PERIOD, TRAINED, VOCABULARY = 6, 24, 12


def patterns(count: int, length: int, seed: int) -> torch.Tensor:
    """Rows that repeat six random tokens: what a model must do is look six positions back."""
    drawn = torch.randint(0, VOCABULARY, (count, PERIOD), generator=torch.Generator().manual_seed(seed))
    return drawn.repeat(1, length // PERIOD + 1)[:, :length]


def trained(**options: Any) -> Transformer:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": VOCABULARY}
    model = build_transformer(ModelConfig(**sizes, seq_length=TRAINED, **options), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(250):
        rows = patterns(24, TRAINED + 1, seed=step)
        model(rows[:, :-1], rows[:, 1:]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.fixture(scope="module")
def rotary() -> Transformer:
    return trained()


@pytest.fixture(scope="module")
def learned() -> Transformer:
    return trained(position_embedding_type="learned_absolute")


@pytest.fixture(params=["rotary", "learned"])
def model(request: pytest.FixtureRequest) -> Transformer:
    found: Transformer = request.getfixturevalue(request.param)
    return found


@pytest.mark.slow
def test_the_loss_by_position_is_flat_beyond_the_trained_length(model: Transformer) -> None:
    losses = token_losses(model, patterns(16, 5 * TRAINED, seed=1_000)).mean(0)
    within, beyond = losses[PERIOD - 1 : TRAINED].mean(), losses[TRAINED:]
    assert within < 0.3
    assert losses[: PERIOD - 1].mean() > 1.5  # what cannot be known
    assert all(part.mean() < within + 0.1 for part in beyond.split(TRAINED // 2))


def test_without_the_window_rotary_positions_beyond_it_are_garbage(rotary: Transformer) -> None:
    rows = patterns(16, 3 * TRAINED, seed=1_000)
    with torch.no_grad():
        losses = rotary(rows[:, :-1], rows[:, 1:]).mean(0)
    assert losses[2 * TRAINED :].mean() > 1.0


def test_the_losses_within_the_trained_length_are_those_of_the_model(model: Transformer) -> None:
    rows = patterns(3, TRAINED, seed=2_000)
    with torch.no_grad():
        expected = model(rows[:, :-1], rows[:, 1:])
    torch.testing.assert_close(token_losses(model, rows), expected)


def test_a_generated_text_keeps_its_pattern_beyond_the_trained_length(model: Transformer) -> None:
    rows = patterns(8, 6 * TRAINED, seed=3_000)
    out = generate(model, rows[:, : 2 * PERIOD], max_new_tokens=rows.shape[1] - 2 * PERIOD, temperature=0)
    is_right = (out == rows).float()
    assert is_right[:, TRAINED:].mean() > 0.97


def test_a_prompt_longer_than_the_trained_length_keeps_its_end(model: Transformer) -> None:
    rows = patterns(4, 3 * TRAINED, seed=4_000)
    out = generate(model, rows, max_new_tokens=5, temperature=0)
    assert torch.equal(out[:, : rows.shape[1]], rows)
    assert torch.equal(out[:, rows.shape[1] :], generate(model, rows[:, -18:], max_new_tokens=5, temperature=0)[:, -5:])


def test_generate_chooses_from_what_the_losses_are_computed_from(rotary: Transformer) -> None:
    tokens = torch.randint(0, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(5))
    out = generate(rotary, tokens, max_new_tokens=4 * TRAINED, seed=1, top_k=1)
    losses = token_losses(rotary, out)[:, 3:]
    assert losses.max() < torch.tensor(float(VOCABULARY)).log() + 1e-4  # each is the most likely one


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 24),
        ({"rope_type": "linear", "factor": 2.0}, 24),
        ({"rope_type": "dynamic", "factor": 2.0}, 48),
        ({"type": "dynamic", "factor": 1.5}, 36),
    ],
)
def test_only_dynamic_scaling_reaches_beyond_the_trained_length(scaling: dict[str, Any] | None, length: int) -> None:
    assert context_length(ModelConfig(seq_length=24, rope_scaling=scaling)) == length


@pytest.mark.parametrize("scaling", ["linear", "dynamic"])
def test_scaled_rotary_positions_extend_the_context(scaling: str) -> None:
    model = build_transformer(ModelConfig(seq_length=8, vocab_size=11, hidden_size=16, init_method_std=0.4), seed=0)
    rows = torch.randint(0, 11, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = torch.cat([(rows[:, :1] + 1) % 11, rows[:, 1:]], dim=1)

    def ends(one: Transformer) -> list[torch.Tensor]:
        return [token_losses(one, row)[:, -1] for row in (rows, changed)]

    assert torch.equal(*ends(model))  # the first token has left the window of 8
    extend_context(model, scaling, 2.0)
    assert context_length(model.config) == 16
    assert not torch.equal(*ends(model))
    assert generate(model, rows, max_new_tokens=20, seed=0).shape == (1, 36)


def test_dynamic_scaling_changes_no_text_of_the_trained_length() -> None:
    plain, scaled = (build_transformer(ModelConfig(seq_length=8, vocab_size=11, hidden_size=16), seed=0) for _ in "ab")
    extend_context(scaled, "dynamic", 4.0)
    rows = torch.randint(0, 11, (1, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(token_losses(plain, rows), token_losses(scaled, rows))


@pytest.mark.parametrize(
    ("options", "scaling", "factor", "message"),
    [
        (
            {"position_embedding_type": "learned_absolute"},
            "linear",
            2.0,
            "requires rotary positions, and this model has",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "linear", 2.0, "are scaled already"),
        ({}, "yarn", 2.0, "must be one of linear, dynamic, got 'yarn'"),
        ({}, "linear", 1.0, "must be a finite number > 1, got 1.0"),
    ],
)
def test_a_context_that_cannot_be_extended_is_refused(
    options: dict[str, Any], scaling: str, factor: float, message: str
) -> None:
    model = build_transformer(ModelConfig(seq_length=8, vocab_size=11, hidden_size=16, **options), seed=0)
    with pytest.raises(ConfigError, match=message):
        extend_context(model, scaling, factor)
