"""The memory of asynchronous saves: what is locked, when it is returned, and the order of copies."""

from __future__ import annotations

import mmap

import pytest
import torch
from torch import Tensor

from onstep.checkpoint.storage.memory_copies import WarmBuffers, storage_of
from tests.support.emulated_lanes import CountingLock, LateLane

BLOCK = 2**20


def buffers(lock: CountingLock, block_bytes: int = BLOCK) -> tuple[WarmBuffers, LateLane]:
    lane = LateLane(torch.device("cpu"))
    return WarmBuffers(lambda device: lane, lock, block_bytes), lane


def state(sizes: list[int]) -> list[Tensor]:
    return [torch.full((size,), index % 100, dtype=torch.int8) for index, size in enumerate(sizes)]


def rounded_up(num_bytes: int) -> int:
    """What `pin_memory` would keep for one block of a state."""
    return 1 << (num_bytes - 1).bit_length()


SEVEN_B = [32_000 * 4096 * 12 // 2048] * 2 + [4 * 4096 * 4096 * 12 // 2048, 3 * 4096 * 11_008 * 12 // 2048] * 32
"""A 2048th of the bytes of 7 billion weights and their state in Adam, by layer."""


@pytest.mark.parametrize("sizes", [SEVEN_B, [3 * BLOCK + 5, 17, BLOCK // 2 + 1, BLOCK], [64] * 1000])
def test_no_more_is_locked_than_the_state_has(sizes: list[int]) -> None:
    lock = CountingLock()
    warm, _ = buffers(lock)
    tensors = state(sizes)
    copies = warm.copy(tensors).wait()
    assert all(torch.equal(one, other) for one, other in zip(copies, tensors, strict=True))
    needed, num_blocks = sum(-(-size // 64) * 64 for size in sizes), len(lock.locked)
    assert needed <= lock.num_bytes == warm.size_bytes < needed + num_blocks * mmap.PAGESIZE
    assert all(one <= max(BLOCK, max(sizes)) + mmap.PAGESIZE for one in lock.locked.values())
    if sizes is SEVEN_B:
        assert lock.num_bytes < 1.01 * needed < rounded_up(needed)
    assert all(address % mmap.PAGESIZE == 0 for address in lock.locked)


def test_a_state_that_grows_returns_what_no_longer_fits_and_locks_only_the_rest() -> None:
    lock = CountingLock()
    warm, _ = buffers(lock)
    weights = [BLOCK // 4] * 16
    warm.copy(state(weights))
    before = dict(lock.locked)
    warm.copy(state([*weights, *weights, *weights]))
    assert before.items() <= lock.locked.items()
    assert lock.num_bytes == lock.most_bytes == 12 * BLOCK
    warm.copy(state([BLOCK // 2 + 64] * 3))
    assert lock.num_bytes == 3 * BLOCK
    warm.copy(state([9 * BLOCK]))
    assert lock.num_bytes == 9 * BLOCK
    assert lock.most_bytes == 12 * BLOCK
    warm.release()
    assert lock.num_bytes == warm.size_bytes == 0


def test_small_tensors_of_changing_sizes_move_no_large_ones() -> None:
    lock = CountingLock()
    warm, _ = buffers(lock)
    large = [BLOCK // 2 - 640] * 6
    for small in (10, 300, 64, 200, 500, 10):
        copies = warm.copy(state([small, *large, 2 * small])).wait()
        assert copies[0].shape == (small,)
        assert lock.num_bytes == warm.size_bytes <= 3 * BLOCK + 2 * mmap.PAGESIZE
    assert lock.most_bytes <= 3 * BLOCK + 2 * mmap.PAGESIZE


def test_memory_that_cannot_be_locked_is_used_all_the_same() -> None:
    lock = CountingLock(refuses=True)
    warm, _ = buffers(lock)
    tensors = state([100, 200])
    assert all(torch.equal(one, other) for one, other in zip(warm.copy(tensors).wait(), tensors, strict=True))
    warm.release()
    assert lock.num_bytes == 0


def test_steady_tensors_are_copied_beside_the_work_and_others_in_its_order() -> None:
    warm, lane = buffers(CountingLock())
    weight, buffer, part = torch.ones(10), torch.ones(3), torch.arange(6.0)
    snapshot = warm.copy([weight, buffer, part[2:]], {storage_of(weight), storage_of(part)})
    buffer.add_(1)
    assert lane.calls == ["in order: 1", "beside: 2"]
    warm.hold_back()
    weight.add_(1)
    warm.hold_back()
    assert lane.calls == ["in order: 1", "beside: 2", "hold back"]
    assert [one.tolist() for one in snapshot.wait()] == [[1.0] * 10, [1.0] * 3, [2.0, 3.0, 4.0, 5.0]]


def test_a_second_save_waits_for_the_copies_of_the_first() -> None:
    warm, lane = buffers(CountingLock())
    weight = torch.ones(10)
    warm.copy([weight], {storage_of(weight)})
    warm.copy([weight], {storage_of(weight)})
    warm.release()
    assert lane.calls == ["beside: 1", "hold back", "beside: 1", "hold back"]
