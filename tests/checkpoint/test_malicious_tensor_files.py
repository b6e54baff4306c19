"""A file that is not exactly a tensor file is refused with its name and a reason, and nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from onstep.checkpoint.format.decoding import document_from_bytes
from onstep.checkpoint.format.tensor_file import read_header, read_tensors, write_tensors
from onstep.checkpoint.format.tensor_header import MAX_HEADER_BYTES
from onstep.errors import CheckpointError


class Bomb:
    """Unpickling it makes the marker file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def refuse(path: Path, reason: str = "") -> None:
    """Both ways of reading refuse the file, by its name and the reason."""
    for read in (read_header, read_tensors):
        with pytest.raises(CheckpointError, match=re.escape(str(path)) + ".*" + reason):
            read(path)


def with_header(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_the_bomb_of_these_tests_goes_off_where_pickles_are_read(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_refused_and_not_run(protocol: int, tmp_path: Path) -> None:
    path, marker = tmp_path / "optimizer.safetensors", tmp_path / "marker"
    path.write_bytes(pickle.dumps(Bomb(marker), protocol))
    refuse(path, "is not a tensor file")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        document_from_bytes(path.read_bytes())
    assert not marker.exists()


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_file_of_torch_save_is_refused_and_not_run(is_zip: bool, tmp_path: Path) -> None:
    path, marker = tmp_path / "model.safetensors", tmp_path / "marker"
    torch.save({"w": torch.ones(100), "bomb": Bomb(marker)}, path, _use_new_zipfile_serialization=is_zip)
    refuse(path, "is not a tensor file")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        document_from_bytes(path.read_bytes())
    assert not marker.exists()


def test_a_pickle_behind_a_valid_header_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bomb = pickle.dumps(Bomb(marker))
    refuse(with_header(tmp_path / "x", {"a": entry()}, b"\0" * 8 + bomb), "added to")
    assert not marker.exists()


def test_a_zip_bomb_is_refused_unopened(tmp_path: Path) -> None:
    path = tmp_path / "bomb.safetensors"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data", bytes(64 * 1024**2))
    tracemalloc.start()
    refuse(path, "its header should have")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1024**2


def valid_file(path: Path) -> Path:
    with path.open("wb") as file:
        write_tensors(file, {"a": torch.arange(10.0), "b": torch.arange(3), "c": torch.tensor([True])}, {"k": "v"})
    return path


def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    whole = valid_file(tmp_path / "whole").read_bytes()
    path = tmp_path / "cut"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        refuse(path, "is not a tensor file")


def test_a_file_with_bytes_after_its_end_is_refused(tmp_path: Path) -> None:
    path = valid_file(tmp_path / "x")
    path.write_bytes(path.read_bytes() + b"\0")
    refuse(path, "added to")


def test_any_flipped_byte_of_the_header_gives_tensors_or_an_error(tmp_path: Path) -> None:
    """The manifest's hash finds each of them; the reader alone must stay within its bounds."""
    whole = valid_file(tmp_path / "whole").read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    path = tmp_path / "flipped"
    generator = random.Random(0)
    refused = 0
    for at in range(header_end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << generator.randrange(8))]) + whole[at + 1 :])
        try:
            tensors = read_tensors(path)
        except CheckpointError:
            refused += 1
        else:
            assert sum(tensor.nbytes for tensor in tensors.values()) == len(whole) - header_end
    assert header_end // 2 < refused


@pytest.mark.parametrize("length", [0, 1, 200, 2**32, 2**60, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_before_anything_is_allocated(length: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * 100)
    refuse(path, f"its header should have {length} bytes")


def test_a_header_beyond_the_limit_is_refused_though_the_file_has_that_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.write((MAX_HEADER_BYTES + 1).to_bytes(8, "little"))
        file.truncate(MAX_HEADER_BYTES * 2)
    refuse(path, f"allowed are 2 to {MAX_HEADER_BYTES}")


HUGE = 2**60

BAD_HEADERS: list[tuple[Any, str]] = [
    (b"[1, 2]", "not a JSON object"),
    (b'"text"', "not a JSON object"),
    (b'{"a": ', "not valid JSON"),
    (b'{"\xff": 1}', "not valid JSON"),
    (b'{"a": ' + b"[" * 50_000, "nested more than 100 levels deep"),
    (b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 8]}}', "digits"),
    (b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}', "NaN"),
    (b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), "a name occurs twice"),
    (b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', "a name occurs twice"),
    ({"__metadata__": {"a": 1}}, "__metadata__"),
    ({"__metadata__": [1]}, "__metadata__"),
    ({"a": 3}, "the entry of 'a'"),
    ({"a": {"dtype": "F32", "shape": [2]}}, "the entry of 'a'"),
    ({"a": {**entry(), "code": "x"}}, "the entry of 'a'"),
    ({"a": entry(dtype="object")}, "dtype"),
    ({"a": entry(dtype=["F32"])}, "dtype"),
    ({"a": entry(dtype=None)}, "dtype"),
    ({"a": entry(shape=[HUGE])}, "shape"),
    ({"a": entry(shape=[HUGE], offsets=[0, HUGE * 4])}, "shape"),
    ({"a": entry(shape=[2**32] * 2, offsets=[0, 0])}, "shape"),
    ({"a": entry(shape=[0, HUGE, HUGE], offsets=[0, 0])}, "shape"),
    ({"a": entry(shape=[2**40], offsets=[0, 2**42])}, "describes"),
    ({"a": entry(shape=[-2])}, "shape"),
    ({"a": entry(shape=[-1, -2])}, "shape"),
    ({"a": entry(shape=[2.0])}, "shape"),
    ({"a": entry(shape=[True, 2])}, "shape"),
    ({"a": entry(shape="2")}, "shape"),
    ({"a": entry(shape=[1] * 65)}, "shape"),
    ({"a": entry(shape=[3])}, "does not fill its 8 bytes"),
    ({"a": entry(offsets=[8, 0])}, "data_offsets"),
    ({"a": entry(offsets=[-8, 0])}, "data_offsets"),
    ({"a": entry(offsets=[0])}, "data_offsets"),
    ({"a": entry(offsets=[0, 8, 8])}, "data_offsets"),
    ({"a": entry(offsets={"0": 8})}, "data_offsets"),
    ({"a": entry(offsets=[0.0, 8.0])}, "data_offsets"),
    ({"a": entry(offsets=[4, 12])}, "'a' leaves a gap"),
    ({"a": entry(), "b": entry()}, "'b' overlaps"),
    ({"a": entry(), "b": entry(offsets=[4, 12])}, "'b' overlaps"),
    ({"a": entry(shape=[1], offsets=[0, 4])}, "describes"),
    ({"a": entry(shape=[4], offsets=[0, 16])}, "describes"),
    ({}, "describes"),
]


@pytest.mark.parametrize(("header", "reason"), BAD_HEADERS, ids=range(len(BAD_HEADERS)))
def test_a_header_that_lies_is_refused(header: Any, reason: str, tmp_path: Path) -> None:
    refuse(with_header(tmp_path / "model.safetensors", header, b"\0" * 8), reason)


def test_bools_other_than_0_and_1_are_refused(tmp_path: Path) -> None:
    path = with_header(tmp_path / "x", {"mask": entry("BOOL", [2], [0, 2])}, b"\x01\x02")
    with pytest.raises(CheckpointError, match="'mask' is a bool tensor"):
        read_tensors(path)


def test_a_long_name_does_not_fill_the_error(tmp_path: Path) -> None:
    path = with_header(tmp_path / "x", {"n" * 10_000: entry(shape=[3])}, b"\0" * 8)
    with pytest.raises(CheckpointError) as refusal:
        read_tensors(path)
    assert len(str(refusal.value)) < 1000


def test_a_missing_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    refuse(tmp_path / "none.safetensors", "No such file")


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    target = valid_file(tmp_path / "target")
    link = tmp_path / "link"
    link.symlink_to(target)
    refuse(link, "symbolic link")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refuse(pipe, "not a regular file")
    refuse(tmp_path, "not a regular file")
    refuse(Path("/dev/zero"), "not a regular file")
