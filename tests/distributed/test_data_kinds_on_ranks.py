"""Chats with a learned tokenizer, and blends of Megatron's files: trained on two ranks, killed and continued."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onstep.data import write_indexed_dataset
from tests.support.forked_processes import Processes
from tests.support.whole_runs import Ranks, check_same, samples_of_epochs, taken

pytestmark = pytest.mark.distributed

DIES = {"rank": 1, "signal": "SIGKILL", "event": "on_step_end", "number": 5}


@pytest.fixture(scope="module")
def ranks(processes: Processes, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Ranks:
    pytest.importorskip("tokenizers")
    processes.load("tokenizers", "transformers.models.auto", "transformers.utils.chat_template_utils", "accelerate")
    directory = tmp_path_factory.mktemp("ranks")
    return Ranks(processes, directory, corpus=str(corpus), cache=str(directory / "cache"))


def chat_file(path: Path, count: int = 90) -> Path:
    rows = [
        {"prompt": f"Say {i * 7 % 13} and {i}", "response": f"{i * 7 % 13} {i}. " * (1 + i % 4)} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def kinds(ranks: Ranks) -> dict[str, list[str]]:
    """The words of each kind."""
    rng = np.random.default_rng(0)
    for name, count in (("a", 30), ("b", 90)):
        documents = [rng.integers(0, 256, size=rng.integers(40, 200)) for _ in range(count)]
        write_indexed_dataset(ranks.directory / name, documents, vocab_size=257, end_id=256)
    chat = chat_file(ranks.directory / "chat.jsonl", 400)
    own = ["checkpoint.save_interval=2", "dataset.num_workers=1"]
    return {
        "chat": [
            *own,
            "dataset.kind=chat",
            f"dataset.paths=[{chat}]",
            "tokenizer.tokenizer_type=bpe",
            "tokenizer.vocab_size=300",
        ],
        "megatron": [
            *own,
            "dataset.kind=megatron",
            f"dataset.paths=[{ranks.directory}/a,{ranks.directory}/b.idx]",
            "dataset.weights=[0.5,0.5]",
            "dataset.reset_attention_mask=true",
            "dataset.eod_mask_loss=true",
        ],
    }


@pytest.mark.parametrize("kind", ["chat", pytest.param("megatron", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_as_if_nothing_had_happened(ranks: Ranks, kinds: dict[str, Any], kind: str) -> None:
    expected = ranks.finish(f"whole-{kind}", words=kinds[kind])
    assert expected["step"] == 11
    assert 0 not in ranks.start(kind, words=kinds[kind], strikes=[DIES]), ranks.output(kind)
    check_same(ranks.finish(kind, words=kinds[kind]), expected)
    epochs = samples_of_epochs(ranks.directory / kind)
    assert set(epochs[0].values()) == {1}
    assert sum((epochs[epoch] for epoch in epochs), Counter()).total() == 11 * 8
    losses = [record["loss"] for record in taken(ranks.directory / kind).values()]
    assert losses[-1] < losses[0]


def test_a_run_keeps_the_tokenizer_that_it_learned(ranks: Ranks, kinds: dict[str, Any]) -> None:
    chat = chat_file(ranks.directory / "grows.jsonl", 400)
    words = [*kinds["chat"], f"dataset.paths=[{chat}]"]
    assert 0 not in ranks.start("grows", words=words, strikes=[DIES])
    run = ranks.directory / "grows" / "runs" / "run"
    learned = (run / "tokenizer.json").read_bytes()
    with chat.open("a") as file:
        file.write(json.dumps({"prompt": "qvqvqvqv " * 50, "response": "kzkzkzkz " * 50}) + "\n")
    ranks.finish("grows", words=[*words, "checkpoint.on_config_change=apply"])
    assert (run / "tokenizer.json").read_bytes() == learned
    assert (run / "model" / "tokenizer.json").read_bytes() == learned


def test_fine_tuning_takes_the_tokenizer_that_the_run_learned(ranks: Ranks, kinds: dict[str, Any]) -> None:
    ranks.finish("base", words=kinds["chat"], ranks=1)
    base = ranks.directory / "base" / "runs" / "run"
    words = [word for word in kinds["chat"] if not word.startswith("tokenizer.")]
    ranks.finish("tuned", words=[*words, f"checkpoint.pretrained_checkpoint={base}"], ranks=1)
    tuned = ranks.directory / "tuned" / "runs" / "run"
    tokenizer = json.loads((tuned / "run.json").read_text())["config"]["tokenizer"]
    assert (tokenizer["tokenizer_type"], tokenizer["tokenizer_model"]) == ("tokenizers", str(base / "tokenizer.json"))
    assert (tuned / "model" / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
