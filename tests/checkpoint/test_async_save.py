"""Saves in the background of training: they hold the state at the call, and no failure is lost."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onstep.checkpoint import (
    CheckpointManager,
    FileStore,
    Operation,
    Retention,
    SavedCheckpoint,
    SaveRequest,
    SharingPattern,
    StateComponent,
    verify,
)
from onstep.checkpoint.storage.memory_copies import WarmBuffers
from onstep.distributed import World
from onstep.errors import CheckpointError
from tests.support.forked_processes import Processes, output_of
from tests.support.small_checkpoints import Box, newest
from tests.support.waiting import PATIENCE

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Gate:
    """A disk that waits until it is opened, or fails."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.is_broken = False
        self.store = FileStore(self._on_operation)

    def _on_operation(self, operation: Operation) -> None:
        if operation.kind == "write" and threading.current_thread() is not threading.main_thread():
            assert self.opened.wait(PATIENCE)
            if self.is_broken:
                raise OSError(errno.EIO, "Input/output error")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def open_manager(tmp_path: Path, gate: Gate) -> Iterator[Callable[..., CheckpointManager]]:
    managers: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        managers.append(CheckpointManager(tmp_path, World(), async_save=True, store=gate.store, **options))
        return managers[-1]

    yield make
    gate.opened.set()
    for manager in managers:
        manager.close()


def request(step: int, box: Box | None = None) -> SaveRequest:
    return SaveRequest(step, [StateComponent("box", box or Box(step=step), SharingPattern.GLOBAL)], {})


def load_newest(manager: CheckpointManager) -> Any:
    box = Box()
    manager.load(newest(manager), [StateComponent("box", box, SharingPattern.GLOBAL)])
    return box.content


def names(root: Path) -> list[str]:
    return sorted(name for name in os.listdir(root) if not name.startswith("."))


@pytest.mark.parametrize("device", DEVICES)
def test_what_changes_after_save_is_not_in_the_checkpoint(
    device: str, gate: Gate, open_manager: Callable[..., CheckpointManager]
) -> None:
    plain = torch.arange(200_000.0, device=device)
    strided, tiny = torch.arange(12.0, device=device).view(3, 4).t(), torch.tensor(3, device=device)
    array, counts = np.arange(5), [1, 2]
    box = Box(plain=plain, view=plain[10:20], strided=strided, tiny=tiny, array=array, counts=counts)
    manager = open_manager()
    for step in (1, 2):  # the second one meets warm buffers
        expected = [tensor.clone().cpu() for tensor in (plain, plain[10:20], strided, tiny)]
        gate.opened.clear()
        manager.save(request(step, box))
        for tensor in (plain, strided, tiny):
            tensor.add_(100)
        array += 100
        counts.append(3)
        gate.opened.set()
        manager.finalize()
        loaded = load_newest(manager)
        found = [loaded[name] for name in ("plain", "view", "strided", "tiny")]
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert loaded["array"].tolist() == [i + 100 * (step - 1) for i in range(5)]
        assert loaded["counts"] == [1, 2, *[3] * (step - 1)]


def test_save_returns_while_the_files_are_written_and_finalize_makes_it_durable(
    tmp_path: Path, gate: Gate, open_manager: Callable[..., CheckpointManager]
) -> None:
    calls: list[SavedCheckpoint] = []
    manager = open_manager(on_durable=calls.append)
    gate.opened.clear()
    manager.save(request(1))
    assert (manager.is_saving, manager.is_written, calls, names(tmp_path)) == (True, False, [], [])
    gate.opened.set()
    while not manager.is_written:
        threading.Event().wait(0.001)
    assert (manager.is_saving, calls, names(tmp_path)) == (True, [], []), "only the loop makes it a checkpoint"
    manager.finalize()
    assert (manager.is_saving, manager.is_written) == (False, True)
    assert [saved.step for saved in calls] == [1]
    assert verify(tmp_path / "checkpoint-1").step == 1
    manager.finalize()
    assert len(calls) == 1, "with nothing pending there is nothing to finalise"


def test_what_is_done_to_the_request_after_save_is_not_in_the_manifest(
    tmp_path: Path, open_manager: Callable[..., CheckpointManager]
) -> None:
    manager, asked = open_manager(), request(1)
    asked.config, asked.metrics = {"train": {"lr": 0.1}}, {"loss": 1.0}
    manager.save(asked)
    asked.config["train"]["lr"], asked.metrics["loss"], asked.step = 0.2, 2.0, 5
    asked.components.clear()
    manager.finalize()
    manifest = verify(tmp_path / "checkpoint-1")
    assert (manifest.config, manifest.metrics) == ({"train": {"lr": 0.1}}, {"loss": 1.0})
    assert list(manifest.components) == ["box"]


def test_a_second_save_waits_for_the_first(tmp_path: Path, open_manager: Callable[..., CheckpointManager]) -> None:
    calls: list[int] = []
    manager = open_manager(on_durable=lambda saved: calls.append(saved.step))
    for step in (1, 2, 3):
        manager.save(request(step))
        assert calls == list(range(1, step))
    manager.finalize()
    assert calls == [1, 2, 3]
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "latest"]


@pytest.mark.parametrize("where", ["finalize", "save"])
def test_a_failure_of_the_thread_comes_out_at_the_next_call(
    where: str, tmp_path: Path, gate: Gate, open_manager: Callable[..., CheckpointManager]
) -> None:
    manager = open_manager()
    manager.save(request(1))
    manager.finalize()
    gate.is_broken = True
    manager.save(request(2))
    with pytest.raises(CheckpointError, match=r"step 2 failed.*Input/output error"):
        manager.finalize() if where == "finalize" else manager.save(request(3))
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-1", "latest"]
    gate.is_broken = False
    manager.save(request(4))
    manager.finalize()
    assert load_newest(manager) == {"step": 4}


def test_a_failure_is_warned_of_when_the_run_continues(
    tmp_path: Path, gate: Gate, open_manager: Callable[..., CheckpointManager], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    manager = open_manager(on_save_error="continue", on_durable=lambda saved: calls.append(saved.step))
    gate.is_broken = True
    manager.save(request(1))
    manager.finalize()
    gate.is_broken = False
    manager.save(request(2))
    manager.finalize()
    assert calls == [2]
    assert "Input/output error" in caplog.text


def test_close_after_an_error_waits_for_a_save_of_one_rank_and_makes_it_a_checkpoint(
    tmp_path: Path, gate: Gate, open_manager: Callable[..., CheckpointManager], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []
    manager = open_manager(retention=Retention(most_recent_k=1), on_durable=lambda saved: calls.append(saved.step))
    manager.save(request(1))
    manager.finalize()
    gate.opened.clear()
    manager.save(request(2))
    assert not manager.is_written
    opener = threading.Timer(0.2, gate.opened.set)
    opener.start()
    manager.close()
    opener.join()
    assert verify(tmp_path / "checkpoint-2").step == 2
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "latest"], "what retention does not keep is deleted"
    assert calls == [1], "callbacks are not called while an error goes through the run"
    assert caplog.text == ""
    assert not manager.is_saving


def test_close_warns_of_a_save_that_failed_and_leaves_nothing_of_it(
    tmp_path: Path, gate: Gate, open_manager: Callable[..., CheckpointManager], caplog: pytest.LogCaptureFixture
) -> None:
    gate.is_broken = True
    manager = open_manager()
    manager.save(request(1))
    manager.close()
    assert len(caplog.records) == 1
    assert "step 1 is abandoned: " in caplog.text
    assert "Input/output error" in caplog.text
    assert os.listdir(tmp_path) == []
    assert not manager.is_saving


@pytest.mark.distributed
def test_close_abandons_a_save_of_several_ranks_since_they_cannot_be_asked(
    processes: Processes, tmp_path: Path
) -> None:
    codes = processes.run("tests.support.jobs.checkpoint_jobs", "close", tmp_path, {}, ranks=2)
    assert codes == [0, 0], output_of(tmp_path)
    for rank in (0, 1):
        said = (tmp_path / f"rank-{rank}.log").read_text()
        assert said.count("step 1 is abandoned: after an error, the other ranks cannot be asked") == 1
    assert os.listdir(tmp_path / "checkpoints") == []


def test_close_lets_deletions_in_the_background_end(
    tmp_path: Path, open_manager: Callable[..., CheckpointManager]
) -> None:
    manager = open_manager(retention=Retention(most_recent_k=1))
    for step in (1, 2, 3):
        manager.save(request(step))
    manager.finalize()
    manager.close()
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-3", "latest"]


def test_the_memory_of_the_copies_is_kept_and_grows_only_when_it_must() -> None:
    buffers = WarmBuffers()
    tensors = [torch.ones(1000), torch.zeros(3, dtype=torch.int8), torch.ones(0), torch.tensor(True)]
    first = buffers.copy(tensors).wait()
    assert all(torch.equal(one, other) for one, other in zip(first, tensors, strict=True))
    size, places = buffers.size_bytes, [copy.data_ptr() for copy in first]
    assert [copy.data_ptr() for copy in buffers.copy(tensors).wait()] == places
    smaller = buffers.copy([torch.arange(10), torch.full((2, 2), 7.0)]).wait()
    assert smaller[0].tolist() == list(range(10))
    assert smaller[1].tolist() == [[7.0, 7.0], [7.0, 7.0]]
    assert buffers.size_bytes == size
    larger = buffers.copy([torch.ones(5000, dtype=torch.float64)]).wait()
    assert larger[0].sum() == 5000
    assert buffers.size_bytes == 40_000
    buffers.release()
    assert buffers.size_bytes == 0
