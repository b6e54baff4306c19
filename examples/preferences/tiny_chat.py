"""Writes a tiny chat model and data for the recipes of this directory, so that they can be tried without a download.

    python tiny_chat.py

The model, of random weights, is `tiny/model`; the data sets `tiny/preferences`, `tiny/ratings` and `tiny/prompts` ask
for sums of small numbers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

HERE = Path("tiny")
NUMBERS = [str(number) for number in range(19)]
MARKS = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def make_model() -> None:
    """A Qwen2 whose tokens are words."""
    words = [*MARKS, *NUMBERS, "plus"]
    tokens = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=MARKS[0]))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token=MARKS[0], eos_token=MARKS[1])
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS[2:]})
    tokenizer.chat_template = TEMPLATE
    config = Qwen2Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(1)
    Qwen2ForCausalLM(config).save_pretrained(HERE / "model")
    tokenizer.save_pretrained(HERE / "model")


def message(role: str, content: object) -> list[dict[str, str]]:
    return [{"role": role, "content": str(content)}]


def write(name: str, rows: Iterable[dict[str, object]]) -> None:
    """A data set as `load_dataset` reads it: one in eight rows is for tests."""
    lines = [json.dumps(row) for row in rows]
    (HERE / name).mkdir(parents=True, exist_ok=True)
    for split, part in (("train", lines[len(lines) // 8 :]), ("test", lines[: len(lines) // 8])):
        (HERE / name / f"{split}.jsonl").write_text("\n".join(part) + "\n", encoding="utf-8")


def make_data() -> None:
    """Each sum, with the right answer and a wrong one."""
    draw = random.Random(1)
    sums = [(a, b, draw.choice([n for n in NUMBERS if n != str(a + b)])) for a in range(10) for b in range(10)]
    draw.shuffle(sums)
    asked = [message("user", f"{a} plus {b}") for a, b, _ in sums]
    right, wrong = [message("assistant", a + b) for a, b, _ in sums], [message("assistant", n) for _, _, n in sums]
    pairs = list(zip(asked, right, wrong, strict=True))
    write("preferences", ({"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in pairs))
    write(
        "ratings", ({"prompt": p, "completion": c, "label": c is good} for p, good, bad in pairs for c in (good, bad))
    )
    write("prompts", ({"prompt": p, "answer": good[0]["content"]} for p, good, _ in pairs))


if __name__ == "__main__":
    make_model()
    make_data()
    print(f"{HERE}/model, and data in {HERE}/preferences, {HERE}/ratings and {HERE}/prompts")
