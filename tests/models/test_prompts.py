"""Prompts continued by our transformer and by one of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from onstep.config import ModelConfig
from onstep.data.corpus.tokenizers import ByteTokenizer
from onstep.errors import ConfigError
from onstep.models import build_transformer, generate
from onstep.models.generation.prompts import (
    can_generate,
    check_options,
    continue_prompts,
    decode_new,
    encode_prompt,
    left_padded,
)

GREEDY = {"do_sample": False}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20}
PROMPTS = ["abc", "de", "fghijk"]


@pytest.fixture(scope="module")
def own() -> nn.Module:
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 264}
    return build_transformer(ModelConfig(**sizes, seq_length=32, init_method_std=0.3), seed=0)  # type: ignore[arg-type]


def letters(**special: str) -> Any:
    """A tokenizer of `transformers` of which every letter is a token."""
    vocab = {"</s>": 0, **{letter: number for number, letter in enumerate("abcdefghijklmnopqrstuvwxyz ", start=1)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **special)


@pytest.fixture(scope="module")
def theirs() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=28, n_positions=24, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5, bos_token_id=0
    )
    config.eos_token_id = None
    return transformers.GPT2LMHeadModel(config).eval()


def texts(model: Any, tokenizer: Any, prompts: list[str], options: dict[str, Any], length: int = 8, seed: int = 0):
    return [text for _, text in continue_prompts(model, tokenizer, prompts, options, length, seed)]


def test_our_transformer_continues_each_prompt_as_generate_does(own: nn.Module) -> None:
    tokenizer = ByteTokenizer()
    for prompt, text in continue_prompts(own, tokenizer, PROMPTS, GREEDY, 8, 0):
        ids = torch.tensor([tokenizer.encode_text(prompt)])
        out = generate(own, ids, max_new_tokens=8, temperature=0, eos_id=256)
        assert text == decode_new(tokenizer, out[0, ids.shape[1] :].tolist())


def test_a_batch_of_prompts_of_different_lengths_gives_what_each_gives_alone(theirs: Any) -> None:
    together = texts(theirs, letters(), PROMPTS, GREEDY)
    assert together == [texts(theirs, letters(), [prompt], GREEDY)[0] for prompt in PROMPTS]
    assert len(set(together)) == 3


@pytest.mark.parametrize("which", ["own", "theirs"])
def test_the_texts_follow_from_the_seed(which: str, request: pytest.FixtureRequest) -> None:
    model, tokenizer = request.getfixturevalue(which), ByteTokenizer() if which == "own" else letters()
    first = texts(model, tokenizer, PROMPTS, SAMPLING, seed=1)
    torch.rand(3)
    assert first == texts(model, tokenizer, PROMPTS, SAMPLING, seed=1)
    assert first != texts(model, tokenizer, PROMPTS, SAMPLING, seed=2)


def test_only_the_new_tokens_are_decoded_and_none_after_the_end() -> None:
    tokenizer = ByteTokenizer()
    assert decode_new(tokenizer, [104, 105, 256, 104]) == "hi"
    assert decode_new(letters(), [8, 9, 0, 8]).replace(" ", "") == "hi"


def test_several_texts_of_a_prompt_stay_with_it(theirs: Any) -> None:
    found = continue_prompts(theirs, letters(), ["ab", "c"], {**SAMPLING, "num_return_sequences": 3}, 4, 0)
    assert [prompt for prompt, _ in found] == ["ab"] * 3 + ["c"] * 3
    assert len({text for _, text in found}) > 2


def test_a_prompt_without_room_for_the_new_tokens_keeps_its_end(theirs: Any) -> None:
    long = "abcdefgh" * 5
    assert texts(theirs, letters(), [long], GREEDY, 8) == texts(theirs, letters(), [long[-16:]], GREEDY, 8)


@pytest.mark.parametrize("copies", [1, 2])
def test_a_text_longer_than_the_positions_slides_over_them(theirs: Any, copies: int) -> None:
    options = {**SAMPLING, "suppress_tokens": [0]}  # the token that ends a text
    found = texts(theirs, letters(), ["abcd", "ef"], {**options, "num_return_sequences": copies}, 60)
    assert len(found) == 2 * copies
    assert {len(letters()(text)["input_ids"]) for text in found} <= {*range(50, 120)}


def test_the_length_of_the_options_wins(own: nn.Module, theirs: Any) -> None:
    for model, tokenizer in ((own, ByteTokenizer()), (theirs, letters())):
        calls = [texts(model, tokenizer, ["ab"], {**GREEDY, "max_new_tokens": 2}, length)[0] for length in (2, 9)]
        assert calls[0] == calls[1]


def test_an_empty_prompt_begins_with_the_token_that_begins_or_ends_a_text() -> None:
    assert encode_prompt(ByteTokenizer(), "") == [256]
    assert encode_prompt(letters(), "") == [0]
    assert encode_prompt(letters(bos_token="b"), "") == [2]


def test_padding_goes_before_a_row_and_is_masked() -> None:
    ids, mask = left_padded([[1, 2, 3], [4]], 9)
    assert ids.tolist() == [[1, 2, 3], [9, 9, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


def test_what_our_transformer_does_not_know_is_refused_with_the_nearest_name(own: nn.Module, theirs: Any) -> None:
    with pytest.raises(ConfigError, match=r"'top_kk' is not one of the built-in transformer's.*mean 'top_k'"):
        check_options(own, {"top_kk": 3})
    with pytest.raises(ConfigError, match=r"'num_beems' is not one of transformers.GenerationConfig.*mean 'num_beams'"):
        check_options(theirs, {"num_beems": 3})
    check_options(theirs, {"num_beams": 3, "max_new_tokens": 4, "pad_token_id": 0})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": -5}, "top_k must be >= 1, got -5"),
        ({"top_p": 2.0}, r"top_p must be in \(0, 1\], got 2.0"),
        ({"temperature": "hot", "do_sample": True}, "must be numbers, got .*'hot'"),
        ({"max_new_tokens": "5"}, "max_new_tokens must be an integer >= 1, got '5'"),
    ],
)
def test_values_that_our_transformer_cannot_work_with_are_refused(
    options: dict[str, Any], message: str, own: nn.Module
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options(own, options)
    check_options(own, {"top_k": 0, "top_p": None, "temperature": 0.0, "do_sample": True})


def test_what_can_generate(own: nn.Module, theirs: Any) -> None:
    assert [can_generate(model) for model in (own, nn.Sequential(own), theirs, nn.Linear(1, 1), [own])] == [
        True,
        True,
        True,
        False,
        False,
    ]
