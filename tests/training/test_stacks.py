"""A rank's place is reported in the user's own lines, and no file of a dead process stays."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from onstep import CallbackManager
from onstep.distributed import beside_compute
from onstep.errors import ConfigError
from onstep.training.watchdog.rank_report import is_consequence
from onstep.training.watchdog.stacks import (
    StackDump,
    is_in_collective,
    place_of,
    place_of_error,
    places_of,
    stacks_of_threads,
    waits_in_collective,
)
from tests.support.forked_processes import Processes


class Broken(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        return self.read(index)

    def read(self, index: int) -> Any:
        raise ValueError(f"row {index} is broken")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_row_that_cannot_be_read_is_placed_in_the_dataset(num_workers: int) -> None:
    loader = torch.utils.data.DataLoader(Broken(), num_workers=num_workers)
    with pytest.raises(ValueError, match="is broken") as caught:
        list(loader)
    line = Broken.read.__code__.co_firstlineno + 1
    assert place_of_error(caught.value) == f"{__file__}:{line} in read"


def test_an_exhausted_iterator_is_placed_in_the_callback() -> None:
    def advance(context: Any) -> None:
        next(iter([]))

    manager = CallbackManager()
    manager.register("on_step_end", advance)
    with pytest.raises(ConfigError, match="raised StopIteration") as caught:
        manager.fire("on_step_end", SimpleNamespace())
    assert place_of_error(caught.value) == f"{__file__}:{advance.__code__.co_firstlineno + 1} in advance"


def test_the_file_of_a_process_that_was_killed_is_swept(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = "tests.support.jobs.hanging_jobs"
    assert processes.run(jobs, "abort_with_a_stack_dump", tmp_path, {}) == [-signal.SIGABRT]
    (tmp_path / "rank-0.out").unlink()
    (left,) = tmp_path.iterdir()
    os.utime(left, (0, 0))  # other ranks have had the time to open it
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = StackDump(is_alone=False)
    second = StackDump(is_alone=False)
    assert not left.exists()
    assert {str(path) for path in tmp_path.iterdir()} == {first.path, second.path}, "those of the living stay"
    second.close()
    first.close()
    assert not list(tmp_path.iterdir())


def test_a_thread_is_found_in_its_own_lines() -> None:
    ends, waits = threading.Event(), threading.Event()

    def träumt() -> None:
        waits.set()
        ends.wait()

    thread = threading.Thread(target=träumt, name="dreamer")
    thread.start()
    waits.wait()
    try:
        assert place_of(places_of(thread.ident or 0)) == f"{__file__}:{träumt.__code__.co_firstlineno + 2} in träumt"
        stacks = stacks_of_threads({threading.get_ident()})
    finally:
        ends.set()
    assert "thread dreamer:\n" in stacks
    assert "\n    ends.wait()\n" in stacks
    assert "MainThread" not in stacks
    thread.join()
    assert places_of(thread.ident or 0) == []


def test_threads_that_begin_while_frames_are_read_are_no_danger() -> None:
    """Threads of C++, such as autograd's: `faulthandler` reads one before Python has set it up, and crashes."""
    library, ends = ctypes.CDLL(None), threading.Event()
    nothing = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: None)

    def begin() -> None:
        while not ends.is_set():
            threads = [ctypes.c_ulong() for _ in range(8)]
            for one in threads:
                assert library.pthread_create(ctypes.byref(one), None, nothing, None) == 0
            for one in threads:
                library.pthread_join(one, None)

    thread = threading.Thread(target=begin)
    thread.start()
    until, seen = time.monotonic() + 2.0, set()
    while time.monotonic() < until:
        seen |= {name for _, _, name in places_of(thread.ident or 0)}
    ends.set()
    thread.join()
    assert "begin" in seen


def test_a_rank_that_waits_below_torchs_dispatcher_is_in_a_collective() -> None:
    root = Path(torch.__file__).parent
    waits = (str(root / "distributed/_functional_collectives.py"), 142, "wait_tensor")
    called = [(str(root / "_library/autograd.py"), 123, "autograd_impl"), (str(root / "_ops.py"), 1279, "__call__")]
    assert is_in_collective([*called, waits])
    assert not is_in_collective([*called, (str(root / "nn/modules/linear.py"), 1, "forward"), waits])
    assert not is_in_collective([])


def test_a_rank_whose_collective_beside_the_backward_pass_fails_is_a_victim() -> None:
    def wait() -> None:
        raise RuntimeError("[pair.cc:537] Read error [127.0.0.1]:38559: Connection reset by peer")

    under_way = beside_compute._UnderWay()
    under_way._work = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    with pytest.raises(RuntimeError) as raised:
        under_way.finish()
    error = raised.value
    frames = traceback.extract_tb(error.__traceback__)
    assert not is_consequence(error), "the innermost frame is the test's"
    error.__traceback__.tb_next.tb_next = None  # type: ignore[union-attr]  # a work of torch's has no frame
    assert is_consequence(error)
    assert waits_in_collective([(one.filename, one.lineno or 0, one.name) for one in frames[1::-1]])
