"""What only a GPU can show: copies of a save on a stream of their own, into memory that is locked and returned."""

from __future__ import annotations

import pytest
import torch

from onstep.checkpoint.storage.memory_copies import WarmBuffers, storage_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SLOW_CYCLES = 200_000_000
"""About 100 ms of a GPU's clock: enough for the host to run ahead."""


def test_steady_tensors_are_copied_beside_the_work_without_waiting() -> None:
    buffers = WarmBuffers()
    weight, buffer = torch.ones(1 << 20, device="cuda"), torch.ones(1000, device="cuda")
    buffers.copy([weight, buffer], {storage_of(weight)}).wait()  # allocates
    for step in range(3):
        torch.cuda._sleep(SLOW_CYCLES)
        weight.fill_(step)
        buffer.fill_(step)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        torch.cuda.set_sync_debug_mode("error")
        try:
            snapshot = buffers.copy([weight, buffer], {storage_of(weight)})
            buffer.fill_(-1)
            torch.cuda._sleep(SLOW_CYCLES)  # forward and backward pass
            buffers.hold_back()
            weight.fill_(-1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not done.query()
        copies = snapshot.wait()
        assert all((copy == step).all() for copy in copies)


def test_the_work_goes_on_while_steady_tensors_are_copied() -> None:
    buffers = WarmBuffers()
    weight = torch.ones(1 << 28, device="cuda")  # 1 GiB
    buffers.copy([weight], {storage_of(weight)}).wait()
    snapshot = buffers.copy([weight], {storage_of(weight)})
    after_small_work = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.ones(10, device="cuda").add_(1)
    after_small_work.record()
    after_small_work.synchronize()
    assert not snapshot.events[0].query()  # type: ignore[attr-defined]
    buffers.hold_back()
    snapshot.wait()


def test_the_memory_is_locked_while_it_is_held() -> None:
    buffers = WarmBuffers()
    tensors = [torch.ones(size, device="cuda") for size in (1000, 3_000_000, 17)]
    copies = buffers.copy(tensors).wait()
    assert all(one.is_pinned() for one in copies)
    larger = buffers.copy([*tensors, torch.ones(9_000_000, device="cuda")]).wait()
    assert all(one.is_pinned() for one in larger)
    needed = sum(one.nbytes for one in larger)
    assert needed <= buffers.size_bytes < needed + 4 * 2**12
    buffers.release()
    assert not any(one.is_pinned() for one in (*copies, *larger))
    torch.zeros(3, device="cuda")  # no error is left behind
