"""Keys of data and tokenizer that do not go together are refused before anything is opened."""

from __future__ import annotations

import pytest

from onstep.config import ConfigContainer, apply_overrides, from_dict, validate
from onstep.errors import ConfigError


def config_with(words: str) -> ConfigContainer:
    config = from_dict({"train.micro_batch_size": 4, "train.train_iters": 100, "optimizer.lr": 1e-3})
    apply_overrides(config, words.split())
    return config


MEGATRON, CHAT = "dataset.kind=megatron dataset.paths=[a,b]", "dataset.kind=chat dataset.paths=[c.jsonl]"


@pytest.mark.parametrize(
    "words",
    [
        MEGATRON,
        f"{MEGATRON} dataset.weights=[0.3,2] dataset.eod_mask_loss=true dataset.reset_attention_mask=true",
        f"{CHAT} tokenizer.tokenizer_type=bpe tokenizer.vocab_size=300 dataset.packing=false dataset.hf_split=sft",
        "dataset.kind=huggingface dataset.paths=[some/name] dataset.hf_subset=en dataset.text_key=body",
        "tokenizer.tokenizer_type=bpe dataset.reset_attention_mask=true",
        "dataset.paths=[a.txt,b.jsonl] dataset.text_key=body",
        "dataset.paths=[directory,a.txt] dataset.text_key=body",
        "dataset.kind=chat dataset.paths=[a.jsonl,some/name] dataset.hf_subset=en",
    ],
)
def test_keys_of_one_kind_go_together(words: str) -> None:
    validate(config_with(words))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dataset.paths=[a] dataset.weights=[1]", r"weights=\[1.0\] has no effect with dataset.kind=text.*megatron"),
        (f"{MEGATRON} dataset.weights=[1]", r"weights=\[1.0\] must have one number for each of the 2"),
        (f"{MEGATRON} dataset.weights=[1,0]", r"weights=\[1.0, 0.0\] must be numbers > 0"),
        (f"{MEGATRON} dataset.weights=[1,.nan]", "must be numbers > 0"),
        (f"{MEGATRON} dataset.text_key=body", "text_key='body' has no effect with dataset.kind=megatron"),
        (f"{CHAT} dataset.eod_mask_loss=true", "eod_mask_loss=True has no effect with dataset.kind=chat"),
        (f"{CHAT} dataset.reset_attention_mask=true", "reset_attention_mask=True has no effect with dataset.kind=chat"),
        ("dataset.packing=false", "packing=False has no effect with dataset.kind=text; set dataset.kind to chat"),
        ("dataset.messages_key=turns", "messages_key='turns' has no effect"),
        ("dataset.hf_subset=en", "hf_subset='en' has no effect .* huggingface or chat"),
        (f"{CHAT} dataset.hf_subset=en", r"hf_subset='en' is a configuration .* are files; drop it"),
        (
            "dataset.kind=huggingface dataset.paths=[a.parquet] dataset.hf_subset=en",
            "hf_subset='en' is a configuration",
        ),
        (
            "dataset.paths=[a.txt,b.md] dataset.text_key=body",
            "text_key='body' is a key of JSONL .* files of plain text",
        ),
        ("dataset.text_key=body", "text_key='body' is a key of JSONL records, and Python's own sources are not"),
        ("dataset.kind=chat", r"paths=\[\] is empty; dataset.kind=chat requires JSONL files"),
        ("dataset.kind=megatron", "requires the prefixes of .bin and .idx files"),
        ("dataset.kind=chats", "Did you mean 'chat'"),
        ("tokenizer.tokenizer_type=bpe tokenizer.tokenizer_model=x", "tokenizer_model='x' has no effect .*=bpe"),
        ("tokenizer.tokenizer_model=x", "tokenizer_model='x' has no effect with tokenizer_type=bytes"),
        ("tokenizer.tokenizer_type=tokenizers", "requires tokenizer.tokenizer_model, the path"),
        ("tokenizer.vocab_size=300", "is what tokenizer_type=bpe learns, and tokenizer_type is bytes"),
        ("tokenizer.tokenizer_type=bpe tokenizer.vocab_size=256", "must be >= 257"),
        (f"{MEGATRON} tokenizer.tokenizer_type=bpe", "learned from text, and dataset.kind=megatron has token ids"),
    ],
)
def test_what_does_not_go_together_names_value_and_remedy(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config_with(words))
