import pytest
import torch

from onstep.errors import ConfigError
from onstep.models.generation.generate import Sampling

PROBABILITIES = torch.tensor([0.05, 0.5, 0.15, 0.3])


def frequencies(sampling, draws=4000):
    logits = PROBABILITIES.log().expand(draws, 4)
    chosen = sampling.choose(logits, torch.Generator().manual_seed(0)).flatten()
    return torch.bincount(chosen, minlength=4) / draws


def test_tokens_come_as_often_as_their_probability():
    torch.testing.assert_close(frequencies(Sampling()), PROBABILITIES, rtol=0, atol=0.03)


def test_temperature_sharpens():
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()

    torch.testing.assert_close(frequencies(Sampling(temperature=0.5)), expected, rtol=0, atol=0.03)


def test_temperature_zero_takes_the_most_likely():
    assert frequencies(Sampling(temperature=0)).tolist() == [0, 1, 0, 0]


def test_top_k_restricts_to_the_most_likely_and_keeps_their_ratio():
    expected = torch.tensor([0, 0.5, 0, 0.3]) / 0.8

    torch.testing.assert_close(frequencies(Sampling(top_k=2)), expected, rtol=0, atol=0.03)


def test_top_k_beyond_the_vocabulary_restricts_nothing():
    torch.testing.assert_close(frequencies(Sampling(top_k=9)), PROBABILITIES, rtol=0, atol=0.03)


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, [1]), (0.45, [1]), (0.6, [1, 3]), (0.9, [1, 2, 3])])
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert frequencies(Sampling(top_p=top_p)).nonzero().flatten().tolist() == kept


def test_a_repetition_penalty_makes_seen_tokens_less_likely_whatever_the_sign_of_their_score():
    logits = torch.tensor([[2.0, 1.5, -3.0, -2.5], [1.0, 2.0, 1.5, 0.0]])
    seen = torch.tensor([[0, 2, 0], [3, 3, 3]])
    greedy, generator = Sampling(temperature=0, repetition_penalty=2.0), torch.Generator()

    assert greedy.choose(logits, generator, seen).flatten().tolist() == [1, 1]
    assert greedy.choose(logits[:, 2:], generator, seen[:, 1:2] - 2).flatten().tolist()[0] == 1
    assert greedy.choose(logits, generator).flatten().tolist() == [0, 1]


def test_the_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    seen = torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(1))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(seen, logits).argmax(-1, keepdim=True)

    chosen = Sampling(temperature=0, repetition_penalty=1.7).choose(logits, torch.Generator(), seen)

    assert torch.equal(chosen, expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be > 0, got 0.0"),
        ({"temperature": -1.0}, "temperature must be a finite number >= 0, got -1.0"),
        ({"temperature": float("inf")}, "temperature must be a finite number"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
    ],
)
def test_values_out_of_range_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)
