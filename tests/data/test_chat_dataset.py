"""Conversations become sequences: packed or one by one, each once, and with the same loss."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.config import DatasetConfig, ModelConfig
from onstep.data import (
    ByteTokenizer,
    ChatDataset,
    ChatFile,
    ChatFiles,
    ChatKeys,
    PackedDataset,
    TrainLoader,
    build_chat_file,
    build_datasets,
)
from onstep.errors import DataError
from onstep.models import build_transformer
from onstep.training import forward_step
from tests.support.waiting import PATIENCE

END = 256


def records(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "response": response} for prompt, response in pairs]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats_of(directory: Path, rows: list[Any]) -> ChatFile:
    source = ChatFiles([write(directory / "chat.jsonl", rows)], ChatKeys())
    return build_chat_file(source, ByteTokenizer(), directory / "cache", show_progress=False)


def ragged(count: int) -> list[dict[str, Any]]:
    """Conversations of 29 to 52 tokens, all different."""
    return records(
        *((f"q{number:03}" + "?" * (number * 7 % 13), f"a{'!' * (number * 5 % 11)}") for number in range(count))
    )


def conversation(record: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Inputs and labels of a record, by hand."""
    prompt = list(f"<|user|>\n{record['prompt']}\n<|assistant|>\n".encode())
    answer = [*record["response"].encode(), END]
    ids = prompt + answer
    return ids[:-1], ([-100] * len(prompt) + answer)[1:]


def test_one_conversation_a_sequence_is_padded_without_labels(tmp_path: Path) -> None:
    rows = records(("hi", "yo"), ("x", ""))
    dataset = ChatDataset(chats_of(tmp_path, rows), 40, pad_id=END)
    batch = dataset.get_batch([1, 0])
    assert set(batch) == {"tokens", "labels"}
    for row, record in zip(range(2), rows[::-1], strict=True):
        tokens, labels = conversation(record)
        rest = 40 - len(tokens)
        assert batch["tokens"][row].tolist() == tokens + [END] * rest
        assert batch["labels"][row].tolist() == labels + [-100] * rest


def test_packed_sequences_hold_whole_conversations_one_after_the_other(tmp_path: Path) -> None:
    rows = records(("a", "b"), ("much longer than the others, it is", "c"), ("d", "e"))
    dataset = PackedDataset(chats_of(tmp_path, rows), 64, pad_id=END)
    assert len(dataset) == 2
    (first, first_labels), (second, second_labels) = conversation(rows[0]), conversation(rows[2])
    sample = {key: value.tolist() for key, value in dataset[0].items()}
    rest = 64 - len(first) - len(second)
    assert sample["tokens"] == first + second + [END] * rest
    assert sample["labels"] == first_labels + second_labels + [-100] * rest
    assert sample["position_ids"] == [*range(len(first)), *range(len(second)), *range(rest)]
    assert sample["document_ids"] == [0] * len(first) + [1] * len(second) + [2] * rest


@pytest.mark.parametrize("seed", [0, 1])
def test_each_conversation_comes_exactly_once_an_epoch(tmp_path: Path, seed: int) -> None:
    rows = ragged(60)
    dataset = PackedDataset(chats_of(tmp_path, rows), 100, pad_id=END)
    assert len(dataset) < 40
    loader = TrainLoader(dataset, micro_batch_size=1, global_batch_size=1, seed=seed)
    found: Counter[bytes] = Counter()
    while (step := loader.read(1)) is not None:
        (batch,) = step.micro_batches
        tokens, documents = batch["tokens"][0], batch["document_ids"][0]
        for document in range(int(documents.max()) + 1):
            found[bytes(t for t in tokens[documents == document].tolist() if t < END)] += 1
    found.pop(b"", None)  # padding
    assert found == Counter(bytes(conversation(record)[0]) for record in rows)


def reference_losses(model: Any, rows: list[dict[str, Any]]) -> float:
    """The sum of losses of each conversation by itself."""
    total = 0.0
    for record in rows:
        tokens, labels = conversation(record)
        logits = model(torch.tensor([tokens]))[0]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(labels), reduction="sum").item()
    return total


@pytest.mark.parametrize("position_embedding_type", ["rope", "learned_absolute"])
def test_packed_and_padded_sequences_have_the_loss_of_the_conversations_alone(
    tmp_path: Path, position_embedding_type: str
) -> None:
    rows = ragged(12)
    config = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, vocab_size=257, seq_length=128)
    config.position_embedding_type = position_embedding_type
    model = build_transformer(config, seed=1).double()
    for parameter in model.parameters():
        parameter.data.mul_(5)  # far from uniform, so that attention matters
    expected, count = reference_losses(model, rows), sum(len(row["response"]) + 1 for row in rows)
    chats = chats_of(tmp_path, rows)
    for kind in (PackedDataset, ChatDataset):
        dataset = kind(chats, 128, pad_id=END)
        batch = dataset.get_batch(range(len(dataset)))
        loss_sum, count_labels = forward_step(iter([batch]), model)
        _, num_labels, _ = count_labels(loss_sum)
        assert int(num_labels) == count
        assert loss_sum.item() == pytest.approx(expected, rel=1e-5)  # the loss itself is float32


def test_a_conversation_that_is_too_long_is_cut_and_counted_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = records(("a", "b" * 60), ("x" * 60, "never reached"), ("c", "d" * 50), ("e", "f"))
    dataset = PackedDataset(chats_of(tmp_path, rows), 40, pad_id=END)
    assert [record.getMessage() for record in caplog.records] == [
        "of 4 conversations, 2 are longer than seq_length=40 and are truncated and 1 have no answer within a sequence "
        "and are dropped"
    ]
    assert len(dataset) == 3
    tokens, labels = conversation(rows[0])
    assert (dataset[0]["tokens"].tolist(), dataset[0]["labels"].tolist()) == (tokens[:40], labels[:40])


@pytest.mark.parametrize("packing", [True, False])
def test_a_share_without_a_conversation_is_reported_as_such(tmp_path: Path, packing: bool) -> None:
    config = config_of(tmp_path, ragged(4), packing=packing, split="90,5,5")
    with pytest.raises(
        DataError, match=r"validation share of split '90,5,5' of 4 .* is empty; .*dataset.split=100,0,0"
    ):
        build_datasets(config, ByteTokenizer(), show_progress=False)
    config.split = "100,0,0"
    train, valid, test = build_datasets(config, ByteTokenizer(), show_progress=False)
    assert len(train) >= 1
    assert (valid, test) == (None, None)


def test_another_rank_does_not_repeat_the_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*records(("a", "b")), {"messages": [{"role": "user", "content": "alone"}]}]
    chats = chats_of(tmp_path, rows)
    assert len(ChatDataset(chats, 40, pad_id=0, warns=False)) == 1
    assert not caplog.records


def test_the_edge_of_a_sequence_keeps_a_label_and_loses_none(tmp_path: Path) -> None:
    rows = records(("a", "b"))
    tokens, labels = conversation(rows[0])
    chats = chats_of(tmp_path, rows)
    exact = ChatDataset(chats, len(tokens), pad_id=0, warns=False)
    assert exact[0]["labels"].tolist() == labels
    shortest = len(tokens) - 1  # the first label of the answer is the last that fits
    assert ChatDataset(chats, shortest, pad_id=0, warns=False)[0]["labels"].tolist() == labels[:-1]
    with pytest.raises(DataError, match="none of 1 conversations has an answer within the first"):
        ChatDataset(chats, shortest - 1, pad_id=0, warns=False)


def config_of(directory: Path, rows: list[Any], **options: Any) -> DatasetConfig:
    path = write(directory / "chat.jsonl", rows)
    settings: dict[str, Any] = {"split": "80,10,10", "seq_length": 100, "cache_dir": str(directory / "cache")} | options
    return DatasetConfig(kind="chat", paths=[str(path)], **settings)


def conversations_in(dataset: Any) -> list[bytes]:
    batch = dataset.get_batch(range(len(dataset)))
    text = bytes(t if t < END else 0 for t in batch["tokens"].flatten().tolist())
    return sorted(b"<|user|>\n" + part.split(b"\n")[0] for part in text.split(b"<|user|>\n")[1:])


@pytest.mark.parametrize("packing", [True, False])
def test_splits_are_of_whole_conversations(tmp_path: Path, packing: bool) -> None:
    rows = ragged(30)
    parts = build_datasets(config_of(tmp_path, rows, packing=packing), ByteTokenizer(), show_progress=False)
    found = [conversations_in(part) for part in parts]
    expected = [f"<|user|>\n{row['prompt']}".encode() for row in rows]
    assert found == [sorted(expected[:24]), sorted(expected[24:27]), sorted(expected[27:])]
    assert all(("document_ids" in part[0]) == packing for part in parts)


def test_keys_and_datasets_of_other_names_are_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = ragged(10)
    renamed = [{"q": row["prompt"], "a": row["response"]} for row in rows]
    keys: Any = {"prompt_key": "q", "response_key": "a", "split": "1"}
    from_file = build_datasets(config_of(tmp_path, renamed, **keys), ByteTokenizer(), show_progress=False)[0]
    saved = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(renamed), "validation": datasets.Dataset.from_list(renamed[:2])}
    )
    saved.save_to_disk(tmp_path / "saved")
    config = config_of(tmp_path, [], **(keys | {"split": "80,20"}))
    config.paths = [str(tmp_path / "saved")]
    train, valid, test = build_datasets(config, ByteTokenizer(), show_progress=False)
    assert conversations_in(train) == conversations_in(from_file)
    assert conversations_in(valid) == sorted(f"<|user|>\n{row['q']}".encode() for row in renamed[:2])
    assert test is None


def test_messages_of_a_dataset_are_read_without_the_keys_that_it_adds(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "user", "content": "x", "name": "me"}, {"role": "assistant", "content": "y"}]}]
    from onstep.data import ChatRows

    source = ChatRows(datasets.Dataset.from_list(rows), ChatKeys(), "rows")
    assert [messages for messages, _ in source.conversations(None)] == [rows[0]["messages"]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", r"chat\.jsonl:2 is not valid JSON"),
        ("[1]", r"chat\.jsonl:2 contains a JSON list"),
        ('{"text": "x"}', r"chat\.jsonl:2 has neither 'messages' nor both .* and 'response' \(its keys: 'text'\)"),
        ('{"prompt": "x", "response": 3}', r"chat\.jsonl:2: 'response' must be a string, got int"),
        ('{"messages": []}', r"chat\.jsonl:2: 'messages' must be a list of messages"),
        ('{"prompt": "x", "response": "a\\ud83d"}', r"jsonl:2: .* contains an unpaired surrogate \('\\ud83d'\)"),
        ('{"messages": [{"role": "user", "content": [{"text": "\\ude00"}]}]}', r"jsonl:2: .* an unpaired surrogate"),
        ('{"messages": [{"content": "x"}]}', r"chat\.jsonl:2: 'messages' must contain messages with 'role'"),
    ],
)
def test_a_record_of_another_form_is_named(tmp_path: Path, line: str, message: str) -> None:
    config = config_of(tmp_path, records(("a", "b")))
    with Path(config.paths[0]).open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=message):
        build_datasets(config, ByteTokenizer(), show_progress=False)
    assert not list((tmp_path / "cache").glob("*.json"))


class Counting(ByteTokenizer):
    """Leaves a line in a file for each text that it encodes, but for marks alone."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def encode_text(self, text: str) -> list[int]:
        if not (text.startswith("<|") and text.endswith("|>")):
            with self._path.open("a") as file:
                file.write("x\n")
        return super().encode_text(text)


def build_counted(config: DatasetConfig, path: Path) -> None:
    build_datasets(config, Counting(path), show_progress=False)


def test_processes_at_once_tokenize_once(tmp_path: Path) -> None:
    config, counts = config_of(tmp_path, ragged(30)), tmp_path / "counts"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=build_counted, args=(config, counts)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len(counts.read_text().split()) == 60  # question and answer of each


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    config = config_of(tmp_path, ragged(30), split="1")
    dataset = build_datasets(config, ByteTokenizer(), show_progress=False)[0]
    whole = conversations_in(dataset)
    for token_file in (dataset.chats.values, dataset.chats.index):
        content = token_file.path.read_bytes()
        token_file.path.write_bytes(content[:-8])
        assert conversations_in(build_datasets(config, ByteTokenizer(), show_progress=False)[0]) == whole
        assert token_file.path.read_bytes() == content


def test_workers_read_the_same(tmp_path: Path) -> None:
    dataset = PackedDataset(chats_of(tmp_path, ragged(40)), 100, pad_id=END)
    assert len(pickle.dumps(dataset)) < 10_000
    read = []
    for num_workers in (0, 2):
        loader = TrainLoader(dataset, micro_batch_size=2, global_batch_size=4, num_workers=num_workers)
        step = loader.read(2)
        assert step is not None
        read.append([batch["tokens"].tolist() for batch in step.micro_batches])
        loader.close()
    assert read[0] == read[1]


@pytest.mark.parametrize("key", ["system", "tools", "input"])
def test_parts_of_a_prompt_that_are_not_read_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    chats_of(tmp_path, [{**row, key: "be kind", "id": 7, "history": []} for row in records(("hi", "yo"))])
    assert f"chat.jsonl has {key!r} beside the messages, which is not read; put it into a message" in caplog.text


def test_other_keys_of_a_record_are_not_worth_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chats_of(tmp_path, [{**row, "id": 7, "source": "web"} for row in records(("hi", "yo"))])
    assert caplog.text == ""


def test_columns_of_a_prompt_that_are_not_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import datasets

    rows = [{"prompt": "a", "response": "b", "input": "c", "id": 1}] * 4
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    config = DatasetConfig(kind="chat", paths=[str(tmp_path / "saved")], split="1", seq_length=32)
    config.cache_dir = str(tmp_path / "cache")
    build_datasets(config, ByteTokenizer(), show_progress=True)
    assert "saved has 'input' beside the messages, which is not read" in caplog.text


def test_an_answer_that_is_not_to_be_trained_on_is_refused(tmp_path: Path) -> None:
    def chat(weight: int | None) -> list[Any]:
        answer = {"role": "assistant", "content": "yo", "weight": weight}
        return [{"messages": [{"role": "user", "content": "hi"}, answer]}]

    chats_of(tmp_path, chat(1))
    chats_of(tmp_path, chat(None))
    with pytest.raises(DataError, match=r"chat.jsonl:1: 'messages': a message has weight=0, .*leave the weight out"):
        chats_of(tmp_path, chat(0))


def test_a_prompt_that_is_not_to_be_trained_on_is_accepted(tmp_path: Path) -> None:
    prompt = {"role": "user", "content": "hi", "weight": 0}
    chats_of(tmp_path, [{"messages": [prompt, {"role": "assistant", "content": "yo", "weight": 1}]}])


def test_a_call_of_a_tool_that_the_plain_template_would_lose_is_refused(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    with pytest.raises(DataError, match=r"chat.jsonl:1: a message has 'tool_calls', .*tokenizer with a chat template"):
        chats_of(tmp_path, [{"messages": [{"role": "user", "content": "hi"}, answer]}])


@pytest.mark.parametrize(("name", "value"), [("hf_split", "validation"), ("hf_subset", "en")])
def test_a_split_of_files_that_have_none_is_refused(tmp_path: Path, name: str, value: str) -> None:
    write(tmp_path / "chat.jsonl", records(("hi", "yo")))
    config = DatasetConfig(kind="chat", paths=[str(tmp_path)], split="1", seq_length=32, cache_dir=str(tmp_path))
    setattr(config, name, value)
    with pytest.raises(DataError, match=rf"dataset.{name}='{value}' selects from a dataset with splits, .*drop it"):
        build_datasets(config, ByteTokenizer(), show_progress=False)


def test_a_subset_of_a_local_dataset_is_refused(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(tmp_path / "saved"))
    config = DatasetConfig(kind="huggingface", paths=[str(tmp_path / "saved")], hf_subset="en", split="1")
    with pytest.raises(DataError, match=r"hf_subset='en' is a configuration of a dataset on the Hub, .*drop it"):
        build_datasets(config, ByteTokenizer(), show_progress=False)
