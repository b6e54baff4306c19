import pytest
import torch
from torch import nn

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import build_transformer, generate


@pytest.fixture(scope="module")
def model():
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 31}
    return build_transformer(ModelConfig(**sizes, seq_length=12, init_method_std=0.3), seed=0)


@pytest.fixture
def prompt():
    return torch.randint(0, 31, (3, 5), generator=torch.Generator().manual_seed(1))


class Wrapper(nn.Module):
    """As DistributedDataParallel: its own forward would need other ranks."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def greedy_without_cache(model, tokens, count):
    """Beyond 12 tokens, the trained length, all but the newest 9 are dropped at once."""
    start = 0
    with torch.no_grad():
        for _ in range(count):
            if tokens.shape[1] - start > 12:
                start = tokens.shape[1] - 9
            tokens = torch.cat([tokens, model(tokens[:, start:])[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens


def test_greedy_generation_is_that_of_a_loop_without_cache(model, prompt):
    out = generate(model, prompt, max_new_tokens=20, temperature=0)

    assert torch.equal(out, greedy_without_cache(model, prompt, 20))


def test_a_seed_repeats_the_tokens_and_another_changes_them(model, prompt):
    def with_seed(seed):
        return generate(model, prompt, max_new_tokens=12, seed=seed)

    assert torch.equal(with_seed(1), with_seed(1))
    assert not torch.equal(with_seed(1), with_seed(2))


def test_without_a_seed_each_call_differs(model, prompt):
    first, second = (generate(model, prompt, max_new_tokens=30) for _ in range(2))

    assert not torch.equal(first, second)


@pytest.mark.parametrize("seed", [None, 7])
def test_the_global_rng_is_neither_changed_nor_read(model, prompt, seed):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    generate(model, prompt, max_new_tokens=4, seed=seed, top_k=5, top_p=0.9)

    assert torch.equal(torch.get_rng_state(), before)


def test_restrictions_reach_the_choice(model, prompt):
    out = generate(model, prompt, max_new_tokens=10, seed=5, top_k=1)

    assert torch.equal(out, greedy_without_cache(model, prompt, 10))


def test_dropout_is_off_and_modes_come_back_as_they_were(prompt):
    model = build_transformer(ModelConfig(hidden_size=16, vocab_size=31, hidden_dropout=0.5), seed=0)
    model.layers[1].eval()

    first, second = (generate(model, prompt, max_new_tokens=8, temperature=0) for _ in range(2))

    assert torch.equal(first, second)
    assert model.training
    assert model.layers[0].dropout.training
    assert not model.layers[1].dropout.training


def test_modes_come_back_after_an_error(prompt):
    model = build_transformer(ModelConfig(hidden_size=16, vocab_size=31), seed=0)

    with pytest.raises(IndexError):
        generate(model, prompt + 31, max_new_tokens=8)

    assert model.training


def test_a_wrapped_model_generates_as_the_one_inside(model, prompt):
    out = generate(Wrapper(Wrapper(model)), prompt, max_new_tokens=6, seed=2)

    assert torch.equal(out, generate(model, prompt, max_new_tokens=6, seed=2))


def test_a_sequence_that_ended_repeats_the_end_until_all_have_ended(model, prompt):
    free = generate(model, prompt, max_new_tokens=20, temperature=0)
    eos_id = free[0, 7].item()

    out = generate(model, prompt, max_new_tokens=20, temperature=0, eos_id=eos_id)

    for row, free_row in zip(out, free, strict=True):
        ends = (free_row[5:] == eos_id).nonzero().flatten()
        length = 5 + ends[0].item() + 1 if len(ends) else len(free_row)
        assert torch.equal(row[:length], free_row[:length])
        assert row[length:].eq(eos_id).all()


@pytest.mark.parametrize("places", [[7], [12, 7], []])
def test_generation_stops_when_all_sequences_have_ended(model, prompt, places):
    free = generate(model, prompt[:1], max_new_tokens=20, temperature=0)
    ends = free[0, places].tolist()
    first_end = next((place for place, one in enumerate(free[0, 5:].tolist()) if one in ends), 19)

    out = generate(model, prompt[:1], max_new_tokens=20, temperature=0, eos_id=ends)

    assert torch.equal(out, free[:, : 5 + first_end + 1])


def test_no_new_tokens_give_back_the_prompt(model, prompt):
    assert torch.equal(generate(model, prompt, max_new_tokens=0), prompt)


def test_generation_works_under_autocast(model, prompt):
    with torch.autocast("cpu", torch.bfloat16):
        out = generate(model, prompt, max_new_tokens=6, temperature=0)

    assert out.shape == (3, 11)


@pytest.mark.parametrize("tokens", [torch.ones(3, dtype=torch.long), torch.ones(1, 0, dtype=torch.long)])
def test_prompts_without_batch_or_token_are_refused(model, tokens):
    with pytest.raises(ConfigError, match="at least one token per sequence"):
        generate(model, tokens, max_new_tokens=1)


def test_a_negative_count_is_refused(model, prompt):
    with pytest.raises(ConfigError, match="max_new_tokens must be >= 0, got -1"):
        generate(model, prompt, max_new_tokens=-1)


def test_another_model_is_refused(prompt):
    with pytest.raises(ConfigError, match="requires an Onstep Transformer, got Linear"):
        generate(nn.Linear(2, 2), prompt, max_new_tokens=1)


def test_a_repetition_penalty_sees_the_prompt_and_the_text_so_far(model, prompt):
    out = generate(model, prompt[:, :3], max_new_tokens=12, temperature=0, repetition_penalty=1e6)

    assert all(len(set(row)) == len(set(row[:3])) + 12 for row in out.tolist())
