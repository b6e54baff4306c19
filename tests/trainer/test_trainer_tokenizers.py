"""The tokenizer of a Trainer in `run.json`, by which losses of runs with different ones are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import tokenizers
import torch
import transformers

from onstep import JsonLogger, Trainer
from onstep.cli.main import main
from onstep.config import TokenizerConfig
from onstep.data import build_tokenizer
from tests.support.small_models import arguments

TEXTS = ["the quick brown fox", "jumps over the lazy dog", "caf\u00e9 na\u00efve the fox", "the dog and the fox"]


def learned(vocab_size: int) -> Any:
    bare = tokenizers.Tokenizer(tokenizers.models.BPE())
    bare.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["</s>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bare.train_from_iterator(TEXTS * 10, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="</s>", pad_token="</s>")


def sizes(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": 320, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, **changes}


def causal() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes(intermediate_size=16)))


def rows(tokenizer: Any, masked: int = 0) -> list[dict[str, list[int]]]:
    """The texts in tokens, of which the first are not trained on."""
    found = [tokenizer(text, add_special_tokens=False).input_ids[:10] for text in TEXTS]
    return [{"input_ids": ids, "labels": [-100] * masked + ids[masked:]} for ids in found]


class OwnData(torch.utils.data.Dataset):
    """Must not be read for the record: reading a row may have effects."""

    def __init__(self, content: Any) -> None:
        self.content, self.num_read = content, 0

    def __len__(self) -> int:
        return len(self.content)

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return self.content[index]


def recorded(directory: Path, tokenizer: Any, data: Any, model: Any = None, **options: Any) -> dict[str, Any] | None:
    args = arguments(directory, output_dir=str(directory), max_steps=2, per_device_train_batch_size=1, logging_steps=1)
    Trainer(
        model=model or causal(),
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[JsonLogger()],
        **options,
    ).train()
    found: dict[str, Any] | None = json.loads((directory / "run.json").read_text()).get("tokenizer")
    return found


@pytest.mark.parametrize("kind", ["list", "masked", "arrow", "collator"])
def test_a_language_models_tokenizer_is_recorded_with_the_bytes_of_its_tokens(tmp_path: Path, kind: str) -> None:
    tokenizer = learned(300)
    data: Any = rows(tokenizer, masked=3 if kind == "masked" else 0)
    ids = [one for row in data for one in row["labels"] if one != -100]
    options: dict[str, Any] = {}
    if kind == "arrow":
        data = datasets.Dataset.from_list(data)
    if kind == "collator":
        data = [{"input_ids": row["input_ids"]} for row in data]
        options["data_collator"] = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    found = recorded(tmp_path / "run", tokenizer, data, **options)
    assert found is not None
    assert found["bytes_per_token"] == pytest.approx(len(tokenizer.decode(ids).encode()) / len(ids), rel=0.05)


def test_it_is_that_of_the_command_line_for_the_same_tokenizer(tmp_path: Path) -> None:
    tokenizer = learned(300)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    opened(TEXTS, padding=True, truncation=True, max_length=4)  # which its backend remembers
    found = recorded(tmp_path / "run", opened, rows(tokenizer))
    config = TokenizerConfig(tokenizer_type="huggingface", tokenizer_model=str(tmp_path / "tokenizer"))
    assert found is not None
    assert found["fingerprint"] == build_tokenizer(config).fingerprint


def test_a_users_dataset_is_not_read_for_it(tmp_path: Path) -> None:
    tokenizer = learned(300)
    data, without = OwnData(rows(tokenizer)), OwnData(rows(tokenizer))
    found = recorded(tmp_path / "run", tokenizer, data)
    assert recorded(tmp_path / "without", None, without) is None
    assert data.num_read == without.num_read
    assert found is not None
    assert set(found) == {"fingerprint"}


def test_a_classifiers_loss_is_not_per_token(tmp_path: Path) -> None:
    tokenizer = learned(300)
    config = transformers.LlamaConfig(**sizes(intermediate_size=16), num_labels=2, pad_token_id=0)
    data = [{"input_ids": row["input_ids"], "labels": 1} for row in rows(tokenizer)]
    model = transformers.LlamaForSequenceClassification(config)
    assert recorded(tmp_path / "run", tokenizer, data, model) is None


def test_runs_with_different_tokenizers_are_compared_per_byte_or_not_at_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = learned(260), learned(300)
    recorded(tmp_path / "small", small, rows(small))
    recorded(tmp_path / "large", large, rows(large))
    recorded(tmp_path / "unknown", large, OwnData(rows(large)))
    recorded(tmp_path / "none", None, [{"input_ids": [1, 2], "labels": [1, 2]}] * 2)
    names = {name: str(tmp_path / name) for name in ("small", "large", "unknown", "none")}
    for first, second, said in (
        ("small", "large", "final loss per byte"),
        ("small", "unknown", "no run is marked as the best"),
        ("large", "none", "no run is marked as the best"),
    ):
        capsys.readouterr()
        assert main(["logs", "compare", names[first], names[second]]) == 0
        assert said in " ".join(capsys.readouterr().out.split())
