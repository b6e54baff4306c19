"""The memory of submissions and versions is used again in the next round, and does not grow."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from onstep.diloco.codec.specs import specs_of
from onstep.diloco.outer import nesterov_sgd
from onstep.diloco.protocol.messages import ParameterSpec
from onstep.diloco.server import masters
from onstep.diloco.server.averaging import Contribution
from onstep.diloco.server.masters import Fragment
from onstep.diloco.server.memory import Block, Buffers, allocate

MB = 1 << 20


def address(block: Block) -> int:
    return int(block.__array_interface__["data"][0])


def test_memory_is_used_again_when_no_tensor_refers_to_it() -> None:
    buffers = Buffers()
    block = buffers.take(2 * MB)
    place, tensor = address(block), torch.frombuffer(block.data.cast("B"), dtype=torch.float32, offset=8)
    del block
    other = buffers.take(2 * MB)
    assert address(other) != place
    del tensor
    assert buffers.free_bytes == 2 * MB
    assert address(buffers.take(2 * MB - 5000)) == place  # a version is a little smaller than a submission of all of it
    assert other.nbytes == 2 * MB


@pytest.mark.parametrize("size", [0, 1, 1000])
def test_small_memory_is_not_kept(size: int) -> None:
    buffers = Buffers()
    assert buffers.take(size).nbytes == size
    assert buffers.free_bytes == 0


def test_no_more_is_kept_than_was_used_together() -> None:
    buffers = Buffers()
    three = [buffers.take(size * MB) for size in (1, 2, 4)]
    del three
    assert buffers.free_bytes == 7 * MB
    for size in (8, 16, 3, 1, 6):
        buffers.take(size * MB)
        assert size * MB <= buffers.free_bytes <= 16 * MB
    assert buffers.free_bytes == 10 * MB  # the block of 16 made room


def test_what_is_mapped_from_a_file_leaves_memory_and_keeps_its_values(tmp_path: Path) -> None:
    buffers = Buffers(tmp_path)
    tensors = allocate([ParameterSpec("a", (3 * MB,), "F32"), ParameterSpec("b", (5,), "F32")], buffers)
    for tensor in tensors.values():
        tensor.fill_(3.0)
    before = _resident_bytes()
    buffers.release(tensors["a"])
    assert before - _resident_bytes() > 10 * MB
    buffers.release(torch.ones(2 * MB))  # of no file, and left alone
    assert float(tensors["a"].sum()) == 9 * MB
    assert float(tensors["b"].sum()) == 15.0
    assert list(tmp_path.iterdir()) == []


def test_without_room_on_the_disk_it_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    buffers = Buffers(tmp_path / "absent")
    block = buffers.take(2 * MB)
    block[:] = 1
    assert int(block.sum()) == 2 * MB
    assert "has no room for submissions (No such file or directory): they stay in memory" in caplog.text


def test_a_step_in_parts_is_the_step_of_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {name: torch.randn(size) for name, size in (("a", 7), ("b", 40), ("c", 3))}
    found = []
    for values in (1 << 22, 10):
        monkeypatch.setattr(masters, "_PART_VALUES", values)
        fragment = Fragment(specs_of(parameters), parameters, nesterov_sgd, "int8")
        for seed in range(3):
            fragment.newest = fragment.step([_contribution(parameters, 2 * seed + one) for one in range(2)])
        found.append(fragment.newest.digest)
    assert found[0] == found[1]


def _contribution(parameters: dict[str, Tensor], seed: int) -> Contribution:
    generator = torch.Generator().manual_seed(seed)
    return Contribution(
        {name: torch.randn(len(one), generator=generator) for name, one in parameters.items()}, "fp32", 1
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
