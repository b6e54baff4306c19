"""The file of records that any logger may continue; what a whole run leaves is tested with `JsonLogger`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from onstep.record import read_records
from onstep.record.writer import JsonLogWriter

NAME = "norms.json"


def write(writer: JsonLogWriter, *steps: int) -> dict[str, Any]:
    """Records of these steps; the state that a checkpoint then holds."""
    for step in steps:
        writer.write_record(step, step / 10, {"norms": {"w": float(step)}})
    return json.loads(json.dumps(writer.state_dict()))


def steps(path: Path) -> list[int]:
    return [record["global_step"] for record in json.loads(path.read_text())]


def test_signatures_are_the_documented_ones() -> None:
    assert [*inspect.signature(JsonLogWriter).parameters] == ["file_name"]
    assert [*inspect.signature(JsonLogWriter.open).parameters][1] == "logging_dir"
    assert [*inspect.signature(JsonLogWriter.write_record).parameters][1:] == ["step", "epoch", "data"]
    assert JsonLogWriter(NAME).state_dict() == {"log_path": None, "last_step": -1, "num_records": 0}


def test_each_record_is_in_the_file_at_once(tmp_path: Path) -> None:
    writer = JsonLogWriter(NAME)
    writer.open(tmp_path / "logs")
    assert writer.is_open
    write(writer, 3)
    (record,) = json.loads((tmp_path / "logs" / NAME).read_text())
    assert list(record) == ["timestamp", "global_step", "epoch", "norms"]
    assert (record["global_step"], record["epoch"], record["norms"]) == (3, 0.3, {"w": 3.0})
    writer.write_record(4, 0.4, {"epoch": 9})
    assert read_records(tmp_path / "logs" / NAME)[1]["epoch"] == 9, "what is recorded wins"
    assert writer.last_step == 4


def test_a_closed_writer_writes_nothing_and_closes_twice(tmp_path: Path) -> None:
    writer = JsonLogWriter(NAME)
    write(writer, 1)
    writer.open(tmp_path)
    write(writer, 1)
    writer.close()
    writer.close()
    assert not writer.is_open
    write(writer, 2)
    assert steps(tmp_path / NAME) == [1]


def test_a_continued_file_keeps_what_the_checkpoint_knows_where_it_was(tmp_path: Path) -> None:
    killed = JsonLogWriter(NAME)
    killed.open(tmp_path)
    state = write(killed, 1, 2)
    write(killed, 2, 3)
    killed.close()
    writer = JsonLogWriter(NAME)
    writer.load_state_dict(state)
    assert writer.state_dict() == state
    writer.open(tmp_path / "elsewhere", 2)
    write(writer, 3, 4)
    assert steps(tmp_path / NAME) == [1, 2, 3, 4]
    assert steps(tmp_path / "norms.branch-1.json") == [2, 3]
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("step", "kept"), [(0, [7]), (2, [1, 2, 7])])
def test_without_a_state_the_step_says_what_is_continued(tmp_path: Path, step: int, kept: list[int]) -> None:
    first = JsonLogWriter(NAME)
    first.open(tmp_path)
    write(first, 1, 2, 3)
    first.close()
    writer = JsonLogWriter(NAME)
    writer.open(tmp_path, step)
    assert writer.last_step == (2 if step else -1)
    write(writer, 7)
    assert steps(tmp_path / NAME) == kept


def test_a_state_loaded_while_open_cuts_at_once(tmp_path: Path) -> None:
    writer = JsonLogWriter(NAME)
    writer.open(tmp_path)
    state = write(writer, 1)
    write(writer, 2)
    writer.load_state_dict(state)
    assert steps(tmp_path / NAME) == [1]
    assert writer.last_step == 1
    write(writer, 2)
    assert steps(tmp_path / NAME) == [1, 2]


def test_reopening_adds_and_cuts_nothing(tmp_path: Path) -> None:
    writer = JsonLogWriter(NAME)
    writer.open(tmp_path)
    write(writer, 1, 2)
    writer.reopen(tmp_path / "elsewhere")
    writer.close()
    writer.reopen(tmp_path / "elsewhere")
    assert writer.last_step == 2
    write(writer, 1)
    assert steps(tmp_path / NAME) == [1, 2, 1]
