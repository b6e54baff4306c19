"""The memory of submissions and versions is used again in the next round, and does not grow."""

from __future__ import annotations

import pytest
import torch

from onstep.diloco.server.memory import Block, Buffers

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
