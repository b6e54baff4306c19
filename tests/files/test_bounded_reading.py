"""Files that others wrote are read within bounds, and each bound is part of the message."""

import os
import threading
import tracemalloc
from pathlib import Path

import pytest

from onstep.errors import CheckpointError, DataError
from onstep.files.bounded_reading import parse_json, read_bytes, read_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "it is nested more than 100 levels deep"),
        ("[" * 101 + "]" * 101, "it is nested more than 100 levels deep"),
        ('{"a":' * 300 + "0" + "}" * 300, "it is nested more than 100 levels deep"),
        ("[" + "9" * 301 + "]", "an integer of 301 digits; at most 300 are allowed"),
        ('{"a": 1, "a": 2}', "a name occurs twice in one object"),
        ('{"a": ', "Expecting value"),
        (b"\xff", "can't decode byte"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_json_out_of_bounds_is_refused_with_the_bound(text: str | bytes, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"state of rank 0 is not valid JSON: .*{reason}"):
        parse_json(text, "state of rank 0", error=CheckpointError)


def test_json_within_the_bounds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_text("[" * 100 + "]" * 100)
    assert str(read_json(path)) == "[" * 100 + "]" * 100
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}', "file") == {
        "model_max_length": 1000000000000000019884624838656
    }


def test_a_large_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(DataError, match=r"sparse has 1,099,511,627,776 bytes, and at most 1,000 are read"):
        read_bytes(path, 1000)


def test_a_small_file_takes_no_memory_for_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "small"
    path.write_bytes(b"1")
    tracemalloc.start()
    try:
        assert read_bytes(path, 1 << 28) == b"1"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_device_without_a_size_is_read_up_to_the_limit() -> None:
    with pytest.raises(DataError, match=r"/dev/zero has 1,001 bytes, and at most 1,000 are read"):
        read_bytes("/dev/zero", 1000)


def test_a_named_pipe_is_refused_at_once_except_where_it_may_be_given(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=r"it is a pipe instead of a file.*pipe"):
        read_json(pipe)
    threading.Thread(target=lambda: pipe.write_bytes(b"{}")).start()
    assert read_bytes(pipe, 10, allows_pipe=True) == b"{}"
