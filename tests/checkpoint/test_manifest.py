"""Manifests: read back exactly as written, and refused with a reason when anybody has had a hand in them."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from onstep.checkpoint.format.tensor_file import FileDigest
from onstep.checkpoint.storage.manifest import MANIFEST, MANIFEST_BYTES, read_manifest, verify
from onstep.errors import CheckpointError
from tests.support.small_checkpoints import FILES, make_manifest, write_checkpoint

GOOD_HASH = "0" * 64


def seal(body: str) -> bytes:
    """The body of a manifest with the right hash at its end: what a forger would write."""
    text = body.encode().removesuffix(b"\n}")
    return text + b',\n  "blake3": "' + blake3(text).hexdigest().encode() + b'"\n}\n'


def forged(**changes: Any) -> bytes:
    """A well-sealed manifest with changed entries; None takes an entry away."""
    content = json.loads(make_manifest(10, {"model/file": FileDigest(3, GOOD_HASH)}).to_bytes())
    del content["blake3"]
    content |= changes
    return seal(json.dumps({key: value for key, value in content.items() if value is not None}, indent=2))


def refusal(directory: Path, content: bytes) -> str:
    (directory / MANIFEST).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(directory)
    assert str(directory / MANIFEST) in str(caught.value)
    return str(caught.value)


def test_a_manifest_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    manifest = make_manifest(
        20,
        {"model/model.safetensors": FileDigest(2**40, "ab" * 32)},
        layout={"mesh": [2, 4]},
        config={"train": {"lr": 1e-3, "name": "größer\n"}},
        versions={"torch": "2.13"},
        metrics={"loss": 0.0, "eval_loss": 1 / 3, "count": 3},
        persistent=False,
        extra={"reason": None},
    )
    (tmp_path / MANIFEST).write_bytes(manifest.to_bytes())
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).size_bytes == 2**40


def test_metrics_that_are_not_finite_survive(tmp_path: Path) -> None:
    content = make_manifest(20, metrics={"loss": math.nan, "norm": -math.inf}).to_bytes()
    (tmp_path / MANIFEST).write_bytes(content)
    metrics = read_manifest(tmp_path).metrics
    assert math.isnan(metrics["loss"])
    assert metrics["norm"] == -math.inf


def test_what_json_has_no_form_for_is_refused_before_it_is_written() -> None:
    with pytest.raises(CheckpointError, match="step 20 cannot be written as JSON"):
        make_manifest(20, config={"object": object()}).to_bytes()
    with pytest.raises(CheckpointError, match="relative"):
        make_manifest(20, {"../escape": FileDigest(1, GOOD_HASH)}).to_bytes()


def test_a_flipped_bit_anywhere_in_a_manifest_is_noticed(tmp_path: Path) -> None:
    content = make_manifest(20, {"file": FileDigest(3, GOOD_HASH)}, config={"a": 1}).to_bytes()
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        refusal(tmp_path, bytes(damaged))


def test_a_shortened_manifest_is_noticed(tmp_path: Path) -> None:
    content = make_manifest(20, {"file": FileDigest(3, GOOD_HASH)}).to_bytes()
    for length in range(0, len(content), 7):
        refusal(tmp_path, content[:length])
    refusal(tmp_path, content + b" ")


def test_the_forger_of_these_tests_can_write_a_good_manifest(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(forged())
    assert read_manifest(tmp_path).step == 10


FILE_NAMES = [
    *("../escape", "a/../../escape", "/etc/passwd", "//etc/passwd", "", ".", "..", "a//b", "a/./b", "a/", "./a"),
    *("a\\..\\b", "a\x00b", "a\nb", "manifest.json", "x" * 256, "/".join(["x" * 200] * 30), "\ud800"),
]


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_path_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    content = forged(files={name: {"size": 3, "blake3": GOOD_HASH}}, components={})
    assert "path" in refusal(tmp_path, content)


CHANGES: list[dict[str, Any]] = [
    {"format": 2},
    {"format": True},
    {"complete": False},
    {"complete": None},
    {"step": -1},
    {"step": 1.0},
    {"step": "10"},
    {"step": True},
    {"step": 2**63},
    {"world_size": None},
    {"run_id": 5},
    {"persistent": 1},
    {"files": []},
    {"files": {"model/file": {"size": -3, "blake3": GOOD_HASH}}},
    {"files": {"model/file": {"size": 10**30, "blake3": GOOD_HASH}}},
    {"files": {"model/file": {"size": 3.5, "blake3": GOOD_HASH}}},
    {"files": {"model/file": {"size": 3, "blake3": "0" * 63}}},
    {"files": {"model/file": {"size": 3, "blake3": "G" * 64}}},
    {"files": {"model/file": {"size": 3}}},
    {"files": {"model/file": [3, GOOD_HASH]}},
    {"files": {"model": {"size": 3, "blake3": GOOD_HASH}, "model/file": {"size": 3, "blake3": GOOD_HASH}}},
    {"components": {"model": "all"}},
    {"components": {"model": {"files": ["model/other"]}}},
    {"components": []},
    {"versions": {"torch": 2}},
    {"metrics": {"loss": "0.5"}},
    {"metrics": {"loss": {}}},
    {"layout": [1]},
    {"config": None},
    {"unheard_of": 1},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_an_entry_that_no_writer_would_make_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    assert "is invalid" in refusal(tmp_path, forged(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"sharing_pattern": "everybody"},
        {"ranks": [-1]},
        {"ranks": [True]},
        {"ranks": "all"},
        {"files": ["model/other"]},
        {"files": [["model/file"]]},
        {"size_bytes": -1},
        {"required": "yes"},
        {"metadata": 3},
        {"loader": "os.system"},
    ],
    ids=str,
)
def test_a_component_that_no_writer_would_make_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    component = json.loads(forged())["components"]["model"]
    assert "is invalid" in refusal(tmp_path, forged(components={"model": component | changes}))


@pytest.mark.parametrize(
    ("entry", "instead", "message"),
    [
        ('"step": 10', '"step": 10, "step": 20', "twice"),
        ('"extra": {}', '"extra": ' + "[" * 200_000 + "]" * 200_000, "not valid JSON"),
        ('"step": 10', '"step": ' + "9" * 10**6, "not valid JSON"),
    ],
    ids=["a repeated key", "deep nesting", "a million digits"],
)
def test_json_that_no_writer_would_make_is_refused(entry: str, instead: str, message: str, tmp_path: Path) -> None:
    body = forged().decode().rpartition(',\n  "blake3"')[0]
    assert message in refusal(tmp_path, seal(body.replace(entry, instead) + "\n}"))


def test_a_huge_manifest_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / MANIFEST).open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(CheckpointError, match=f"at most {MANIFEST_BYTES}"):
        read_manifest(tmp_path)


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [MANIFEST, *FILES])
def test_a_pickle_in_place_of_a_file_is_refused_and_does_nothing(name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "root", 10)
    (directory / name).write_bytes(pickle.dumps(Bomb(tmp_path / "mark")))
    with pytest.raises(CheckpointError, match=Path(name).name):
        verify(directory)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("name", [MANIFEST, "model/model.safetensors"])
@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "missing"])
def test_only_a_regular_file_of_the_checkpoint_itself_is_read(kind: str, name: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "root", 10)
    path = directory / name
    path.rename(tmp_path / "moved")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "moved")
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    with pytest.raises(CheckpointError, match=path.name):
        verify(directory)


def test_a_linked_directory_inside_a_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "root", 10)
    (directory / "model").rename(tmp_path / "moved")
    (directory / "model").symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match=r"model must be a directory inside the checkpoint"):
        verify(directory)


def test_verify_tells_its_progress_in_bytes(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, 10)
    calls: list[int] = []
    verify(directory, progress=calls.append)
    assert sum(calls) == sum(len(content) for content in FILES.values())
