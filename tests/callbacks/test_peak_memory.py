"""Peaks of every rank, and a snapshot that is really written."""

from __future__ import annotations

import logging
import pickletools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onstep import pretrain
from onstep.callbacks.peak_memory import PeakMemory
from onstep.config import ConfigContainer

GIB = 2**30


class FakeAllocator:
    """A GPU's allocator, without the GPU."""

    def __init__(self, peak: int = 0) -> None:
        self.peak, self.calls = peak, list[str]()

    def is_available(self) -> bool:
        return True

    def peak_bytes(self) -> int:
        return self.peak

    def details(self) -> str:
        return "the allocator's table"

    def start_history(self) -> None:
        self.calls.append("start")

    def stop_history(self) -> None:
        self.calls.append("stop")

    def dump_history(self, path: str) -> None:
        self.calls.append("dump")
        Path(path).write_text("history", encoding="utf-8")


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, int, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, value: int, step: int) -> None:
        self.scalars.append((tag, value, step))

    def add_text(self, tag: str, text: str, step: int) -> None:
        self.texts.append((tag, text, step))

    def flush(self) -> None:
        self.flushed += 1


def train(callback: PeakMemory, logs: list[dict[str, Any]], make_state: Any, *, rank: int = 0, device: str = "cuda:0"):
    """Fire a training's events, as the loop does."""
    args = SimpleNamespace(device=device)
    state = make_state(step=10, rank=rank, num_processes=2)
    callback.on_train_begin(args, state, None)
    for record in logs:
        callback.on_log(args, state, None, logs=record)
    callback.on_train_end(args, state, None)
    callback.on_run_end(args, state, None)


def with_allocator(callback: PeakMemory, peak: int = 0) -> FakeAllocator:
    callback.memory = allocator = FakeAllocator(peak)  # type: ignore[assignment]
    return allocator


LOGS = [{"peak_mem_allocated": [3 * GIB, 5 * GIB]}, {"loss": 1.0}, {"peak_mem_allocated": [2 * GIB, 6 * GIB]}]


@pytest.mark.parametrize(("rank", "peak", "most"), [(0, 0, 3), (1, 0, 6), (1, 7, 7)])
def test_each_rank_reports_the_most_that_it_had(
    rank: int, peak: int, most: int, make_state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    callback = PeakMemory()
    with_allocator(callback, peak * GIB)
    with caplog.at_level(logging.INFO):
        train(callback, LOGS, make_state, rank=rank)
    assert (callback.rank, callback.world_size, callback.max_allocated) == (rank, 2, most * GIB)
    assert caplog.messages == [f"RANK{rank} MAX CUDA MEMORY ALLOCATED: {most}.000 GiB"]


def test_rank_0_logs_a_line_for_every_logged_step(make_state: Any, caplog: pytest.LogCaptureFixture) -> None:
    callback = PeakMemory(do_log=True, show_details=True)
    with_allocator(callback)
    with caplog.at_level(logging.INFO):
        train(callback, LOGS, make_state)
    assert caplog.messages == [
        "Peak CUDA Memory Allocated: RANK0 3.000 GiB, RANK1 5.000 GiB",
        "the allocator's table",
        "Peak CUDA Memory Allocated: RANK0 2.000 GiB, RANK1 6.000 GiB",
        "the allocator's table",
        "RANK0 MAX CUDA MEMORY ALLOCATED: 3.000 GiB",
    ]


def test_details_without_do_log_come_at_the_end(make_state: Any, caplog: pytest.LogCaptureFixture) -> None:
    callback = PeakMemory(show_details=True)
    with_allocator(callback)
    with caplog.at_level(logging.INFO):
        train(callback, LOGS, make_state)
    assert caplog.messages[1:] == ["the allocator's table"]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_writes_to_tensorboard(rank: int, make_state: Any) -> None:
    writer = Writer()
    callback = PeakMemory(writer, show_details=rank == 0)
    with_allocator(callback)
    train(callback, LOGS, make_state, rank=rank)
    expected = [
        ("peak_memory_rank0", 3 * GIB, 10),
        ("peak_memory_rank1", 5 * GIB, 10),
        ("peak_memory_rank0", 2 * GIB, 10),
        ("peak_memory_rank1", 6 * GIB, 10),
    ]
    assert writer.scalars == (expected if rank == 0 else [])
    assert [tag for tag, _, _ in writer.texts] == (["peak_memory_details"] * 2 if rank == 0 else [])
    assert writer.flushed == (2 if rank == 0 else 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_snapshot_alone_is_written_at_the_end_by_every_rank(rank: int, make_state: Any, tmp_path: Path) -> None:
    callback = PeakMemory(enable_memory_snapshot=True, file_prefix=str(tmp_path / "deep" / "memory"))
    allocator = with_allocator(callback)
    train(callback, [], make_state, rank=rank)
    assert allocator.calls == ["start", "dump", "stop"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == [f"memory_rank{rank}.pickle"]


def test_a_snapshot_that_cannot_be_written_costs_a_warning(
    make_state: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    callback = PeakMemory(enable_memory_snapshot=True, file_prefix=str(tmp_path / "file" / "memory"))
    allocator = with_allocator(callback)
    train(callback, [], make_state)
    assert "cannot write the memory history" in caplog.text
    assert allocator.calls == ["start", "stop"]


def test_two_runs_in_a_row_are_measured_apart(make_state: Any, tmp_path: Path) -> None:
    callback = PeakMemory(enable_memory_snapshot=True, file_prefix=str(tmp_path / "memory"))
    allocator = with_allocator(callback)
    train(callback, LOGS, make_state)
    train(callback, [{"peak_mem_allocated": [GIB, GIB]}], make_state)
    assert callback.max_allocated == GIB
    assert allocator.calls == ["start", "dump", "stop"] * 2
    callback.on_run_end(None, None, None)
    assert allocator.calls[-1] == "stop"


def test_a_run_on_the_cpu_reports_nothing(make_state: Any, caplog: pytest.LogCaptureFixture) -> None:
    callback = PeakMemory(do_log=True, enable_memory_snapshot=True)
    allocator = with_allocator(callback)
    with caplog.at_level(logging.INFO):
        train(callback, LOGS, make_state, device="cpu")
    assert (callback.enabled, allocator.calls, caplog.messages) == (False, [], [])


def test_rank_and_world_size_are_those_of_torchrun_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    callback = PeakMemory()
    assert (callback.rank, callback.world_size) == (3, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_the_snapshot_of_a_run_is_written_and_holds_its_allocations(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    tiny_config.dist.device = "cuda"
    callback = PeakMemory(enable_memory_snapshot=True, file_prefix=str(tmp_path / "memory"))
    pretrain(tiny_config, callbacks=[callback])
    content = (tmp_path / "memory_rank0.pickle").read_bytes()
    words = {argument for _, argument, _ in pickletools.genops(content) if isinstance(argument, str)}
    assert {"device_traces", "segments", "alloc"} <= words
    assert any(word.endswith("transformer.py") for word in words)
    assert callback.max_allocated > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_a_run_that_runs_out_of_memory_leaves_its_snapshot(
    tiny_config: ConfigContainer, tmp_path: Path
) -> None:
    def greedy(data_iterator: Any, model: Any) -> Any:
        return torch.empty(2**50, device="cuda"), None

    tiny_config.dist.device = "cuda"
    callback = PeakMemory(enable_memory_snapshot=True, file_prefix=str(tmp_path / "memory"))
    with pytest.raises(torch.OutOfMemoryError):
        pretrain(tiny_config, greedy, callbacks=[callback])
    assert (tmp_path / "memory_rank0.pickle").stat().st_size > 1000
