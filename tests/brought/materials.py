"""Tiny models, a tokenizer and data of TRL's formats, made on the spot in a directory."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.brought.example_inputs import write_example_inputs

SEED = 7
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWARDS = """
def variety(completions, **others):
    return [len(set(messages[0]["content"])) / 10 for messages in completions]
"""
"""The module whose function GRPO rewards by."""
WORDS = [
    "river",
    "stone",
    "light",
    "water",
    "green",
    "small",
    "house",
    "winter",
    "bread",
    "morning",
    "letter",
    "garden",
]
Row = dict[str, object]


def make(directory: Path) -> Path:
    """Write the models and data sets into an empty directory; returns it. The same files each time."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    tokenizer = _tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=1,
    )
    for name, kind in (("model", Qwen2ForCausalLM), ("rewards", Qwen2ForSequenceClassification)):
        torch.manual_seed(SEED)
        kind(config).save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
    for name, row in ROWS.items():
        write_rows(directory / name, row)
    (directory / "rewards.py").write_text(REWARDS)
    write_example_inputs(directory / "examples")
    return directory


def write_rows(directory: Path, row: Callable[[random.Random], Row], sizes: tuple[int, int] = (96, 16)) -> None:
    """Write a data set of two splits, train and test, as `load_dataset(directory)` reads it."""
    directory.mkdir(parents=True)
    for seed, (split, size) in enumerate(zip(("train", "test"), sizes, strict=True)):
        source = random.Random(seed)
        lines = (json.dumps(row(source)) for _ in range(size))
        (directory / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def sentence(source: random.Random, shortest: int = 3, longest: int = 14) -> str:
    """Words in a random order."""
    return " ".join(source.choices(WORDS, k=source.randint(shortest, longest)))


def message(role: str, content: str) -> dict[str, str]:
    """A message of a chat."""
    return {"role": role, "content": content}


def _asked(source: random.Random) -> list[dict[str, str]]:
    return [message("user", sentence(source))]


def _answer(source: random.Random) -> list[dict[str, str]]:
    return [message("assistant", sentence(source))]


def _pair(source: random.Random) -> Row:
    return {"prompt": _asked(source), "chosen": _answer(source), "rejected": _answer(source)}


def _rated(source: random.Random) -> Row:
    return {"prompt": _asked(source), "completion": _answer(source), "label": source.random() < 0.5}


ROWS: dict[str, Callable[[random.Random], Row]] = {
    "texts": lambda source: {"text": sentence(source)},
    "chats": lambda source: {"messages": [*_asked(source), *_answer(source)]},
    "preferences": _pair,
    "ratings": _rated,
    "prompts": lambda source: {"prompt": _asked(source), "solution": sentence(source, 1, 2)},
}
"""The data sets, by name, and what makes a row of each."""


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    trained.train_from_iterator(_sentences(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _sentences() -> Iterator[str]:
    source = random.Random(SEED)
    return (sentence(source) for _ in range(200))
