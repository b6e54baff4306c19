"""Directories of torch.distributed.checkpoint are read without unpickling anything, and written as safetensors."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from onstep.checkpoint.dcp.described import Made, MalformedPickleError, Named, Pairs, describe
from onstep.checkpoint.dcp.directory import open_dcp
from onstep.cli.main import main
from onstep.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

WEIGHTS = {
    "embed.weight": torch.randn(7, 6),
    "half": torch.randn(3).to(torch.bfloat16),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "row": torch.randn(1, 5),
}


def save(directory: Path, state: dict[str, Any], **options: Any) -> Path:
    dcp.save(state, checkpoint_id=directory, no_dist=True, **options)
    return directory


def run(*words: Any) -> int:
    return main(["checkpoint", "convert", *map(str, words)])


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        one.dtype == expected[name].dtype and torch.equal(one, expected[name]) for name, one in found.items()
    )


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("titan") / "step-3"
    return save(directory, {"model": WEIGHTS, "optimizer": {"exp_avg": torch.ones(2)}, "train_state": {"step": 3}})


def test_tensors_are_read_as_they_were_saved(titan: Path) -> None:
    found = open_dcp(titan)
    assert found.pickled == ["train_state.step"]
    assert same(
        {name: one.read() for name, one in found.tensors.items()},
        {**{f"model.{name}": one for name, one in WEIGHTS.items()}, "optimizer.exp_avg": torch.ones(2)},
    )


def test_the_command_writes_what_is_chosen(titan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(titan, tmp_path / "out") == 1
    said = capsys.readouterr().err
    assert "1 values that are pickles, which are not read as they can run code: train_state.step" in said
    assert "--tensors-only" in said
    assert "5 begin with model." in said
    assert run(titan, tmp_path / "all", "--tensors-only") == 0
    assert load_file(tmp_path / "all" / "model.safetensors").keys() > {"optimizer.exp_avg", "model.half"}
    capsys.readouterr()
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "config.json").write_text("{}")
    words = (titan, tmp_path / "out", "--prefix", "model.", "--config-from", beside)
    assert run(*words) == 0
    assert "5 tensors; with config.json of" in capsys.readouterr().out
    assert same(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)
    assert run(*words) == 1
    assert run(*words, "--force", "--dtype", "float16") == 0
    assert load_file(tmp_path / "out" / "model.safetensors")["half"].dtype is torch.float16
    assert run(titan, tmp_path / "one.safetensors", "--prefix", "model.") == 0
    assert same(load_file(tmp_path / "one.safetensors"), WEIGHTS)
    assert run(titan, tmp_path / "none", "--prefix", "weights.") == 1
    assert "no tensor whose name begins with 'weights.'" in capsys.readouterr().err


def test_a_directory_of_safetensors_is_converted_too(tmp_path: Path) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / "hf"), save_distributed=True)
    dcp.save({**WEIGHTS}, storage_writer=writer, no_dist=True)
    assert run(tmp_path / "hf", tmp_path / "out") == 0
    assert same(load_file(tmp_path / "out" / "model.safetensors"), WEIGHTS)


class Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_is_described_and_nothing_in_it_runs(tmp_path: Path, protocol: int) -> None:
    value = {"a": [1, -2, 2**70, 0.5, None, True], "b": (b"x", "ä" * 300), (1, 2): Bomb(str(tmp_path / "made"))}
    found = describe(pickle.dumps(value, protocol))
    assert isinstance(found, Pairs)
    assert found[:1] == [("a", [1, -2, 2**70, 0.5, None, True])]
    assert found[1][1][1] == "ä" * 300
    bomb = found[2][1]
    assert isinstance(bomb, Made)
    assert isinstance(bomb.by, Named)
    assert (bomb.kind, bomb.arguments) == ("mkdir", (str(tmp_path / "made"),))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "content", [b"", b".", b"\x80\x04", b"K\x01", b"(K\x01u.", b"i", b"h\x07.", b"\x8d" + b"\xff" * 8]
)
def test_bytes_that_are_no_pickle_are_refused(content: bytes) -> None:
    with pytest.raises(MalformedPickleError):
        describe(content)


def test_a_pickle_that_would_run_code_is_refused_as_metadata(titan: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(titan, tmp_path / "copy"))
    (directory / ".metadata").write_bytes(pickle.dumps(Bomb(str(tmp_path / "made"))))
    with pytest.raises(CheckpointError, match=r"\.metadata cannot be read: it has no Metadata"):
        open_dcp(directory)
    assert not (tmp_path / "made").exists()


def test_damage_and_what_cannot_be_read_is_named(titan: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(titan, tmp_path / "copy"))
    file = next(directory.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-700])
    with pytest.raises(CheckpointError, match=r"\.distcp"):
        open_dcp(directory)
    strided = save(tmp_path / "strided", {"turned": torch.randn(4, 3).t()})
    with pytest.raises(CheckpointError, match=r"'turned' is not stored as torch.save stores a tensor of \[3, 4\]"):
        open_dcp(strided)
    outside = Path(shutil.copytree(titan, tmp_path / "outside"))
    name, other = file.name.encode(), b"../x".ljust(len(file.name), b"x")
    (outside / ".metadata").write_bytes((outside / ".metadata").read_bytes().replace(name, other))
    with pytest.raises(CheckpointError, match="outside of the directory"):
        open_dcp(outside)
    with pytest.raises(CheckpointError, match=r"no \.metadata and no safetensors files; give one of .*titan"):
        open_dcp(titan.parent)
    with pytest.raises(CheckpointError, match="as a finished save leaves it"):
        open_dcp(tmp_path / "absent")
