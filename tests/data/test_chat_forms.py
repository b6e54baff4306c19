"""Conversations are recognised by their keys in the forms that people have, and every start says what is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from onstep.config import DatasetConfig
from onstep.data import ByteTokenizer, ChatKeys, build_datasets
from onstep.errors import DataError

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"conversations": [USER, ANSWER]}, [USER, ANSWER]),
        ({"prompt": "hi", "response": "yo"}, [USER, ANSWER]),
        ({"prompt": "hi", "completion": "yo"}, [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"instruction": "hi", "output": "yo"}, [USER, ANSWER]),
        ({"instruction": "hi", "input": "", "output": "yo", "system": ""}, [USER, ANSWER]),
        (
            {"instruction": "hi", "input": "there", "output": "yo", "system": "be kind", "history": [["a", "b"]]},
            [
                SYSTEM,
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b"},
                {"role": "user", "content": "hi\nthere"},
                ANSWER,
            ],
        ),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}], "system": "be kind"},
            [SYSTEM, USER, ANSWER],
        ),
        ({"messages": [{"from": "System", "value": "be kind"}, {"from": "user", "value": "hi"}]}, [SYSTEM, USER]),
        ({"messages": None, "prompt": None, "instruction": "hi", "output": "yo"}, [USER, ANSWER]),
    ],
)
def test_a_record_is_recognised_by_its_keys(record: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    assert ChatKeys().read(record, "here") == messages


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"instruction": "hi"},
            r"here has neither 'messages' nor both 'prompt' and 'response' \(its keys: 'instruction",
        ),
        ({"instruction": 1, "output": "yo"}, "here: 'instruction' must be a string, got int"),
        ({"instruction": "hi", "output": ["yo"]}, "here: 'output' must be a string, got list"),
        ({"instruction": "hi", "output": "yo", "history": [["a"]]}, "'history' must be a list of pairs"),
        ({"conversations": "hi"}, "'conversations' must be a list of messages, got 'hi'"),
        ({"conversations": []}, "here: ShareGPT's conversations must be a list of messages"),
        ({"conversations": [{"from": "martian", "value": "hi"}]}, "is from 'martian', which corresponds to no role"),
        ({"prompt": "hi", "completion": [ANSWER]}, "'completion' must be a string, got list"),
    ],
)
def test_a_malformed_record_is_refused_with_its_place(record: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ChatKeys().read(record, "here")


def test_keys_of_the_users_own_are_the_only_ones() -> None:
    keys = ChatKeys(prompt="instruction", response="output")
    assert keys.read({"instruction": "hi", "input": "there", "output": "yo"}, "here") == [USER, ANSWER]
    with pytest.raises(DataError, match="has neither"):
        keys.read({"conversations": [USER, ANSWER]}, "here")


def started(caplog: pytest.LogCaptureFixture, config: DatasetConfig) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.INFO):
        build_datasets(config, ByteTokenizer(), show_progress=True)
    return [record.getMessage() for record in caplog.records if "conversations" in record.getMessage()]


ALPACA = {"instruction": "hi", "input": "there", "output": "yo"}


def written(directory: Path, rows: list[dict[str, Any]], as_rows: bool) -> DatasetConfig:
    path = directory / "chat.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if as_rows:
        import datasets

        path = directory / "saved"
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return DatasetConfig(
        kind="chat", paths=[str(path)], split="1", seq_length=64, cache_dir=str(directory / "cache"), packing=False
    )


@pytest.mark.parametrize("as_rows", [False, True])
@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        (ALPACA, "Alpaca's instructions: 'instruction' and 'output' (with 'input', 'system' and 'history')"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "ShareGPT's conversa"),
        ({"prompt": "a", "completion": "b"}, "prompt and completion: 'prompt' and 'completion'"),
        ({"messages": [USER, ANSWER]}, "messages: 'messages'"),
    ],
)
def test_every_start_says_the_form_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, row: dict[str, Any], sentence: str, as_rows: bool
) -> None:
    config = written(tmp_path, [row] * 3, as_rows)
    first, again = started(caplog, config), started(caplog, config)
    assert first == again
    [line] = [line for line in first if "are read as" in line]
    assert sentence in line


@pytest.mark.parametrize("as_rows", [False, True])
def test_every_start_says_what_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture, as_rows: bool) -> None:
    config = written(tmp_path, [ALPACA] * 3, as_rows)
    config.prompt_key, config.response_key = "instruction", "output"
    for _ in range(3):
        started(caplog, config)
        assert "has 'input' beside the messages, which is not read; put it into a message" in caplog.text


def test_alpacas_input_is_part_of_the_prompt(tmp_path: Path) -> None:
    train = build_datasets(written(tmp_path, [ALPACA], False), ByteTokenizer(), show_progress=False)[0]
    assert bytes(token for token in train[0]["tokens"].tolist() if token < 256).startswith(b"<|user|>\nhi\nthere\n")


def test_records_of_several_forms_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = written(tmp_path, [ALPACA, ALPACA, {"messages": [USER, ANSWER]}], False)
    [line] = [line for line in started(caplog, config) if "are read as" in line]
    assert "'history') (2); messages: 'messages' (1)" in line


def test_another_rank_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = written(tmp_path, [ALPACA], False)
    started(caplog, config)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        build_datasets(config, ByteTokenizer(), show_progress=False, wait_for_other=True)
    assert "are read as" not in caplog.text


def test_a_cache_of_an_older_version_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = written(tmp_path, [ALPACA], False)
    first = started(caplog, config)
    [notes] = (tmp_path / "cache").glob("*-notes.json")
    content = {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.tokens")}
    for damaged in (notes.unlink, lambda: notes.write_text("{", encoding="utf-8")):
        damaged()
        assert started(caplog, config) == first
        assert {path.name: path.read_bytes() for path in (tmp_path / "cache").glob("*.tokens")} == content


def test_validation_sets_of_the_same_data_do_not_repeat_the_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets

    rows = datasets.Dataset.from_list([ALPACA] * 2)
    datasets.DatasetDict(train=rows, validation=rows).save_to_disk(str(tmp_path / "both"))
    config = DatasetConfig(kind="chat", paths=[str(tmp_path / "both")], split="80,20,0", seq_length=64)
    config.cache_dir = str(tmp_path / "cache")
    assert len([line for line in started(caplog, config) if "are read as" in line]) == 1
