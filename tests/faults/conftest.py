"""Directories that the fault tests start from: checkpoints 5 and 10, saved by each driver."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onstep.checkpoint.storage.store import FileStore, Operation
from tests.support.faults.fault_saves import DRIVERS, Recorder
from tests.support.faults.forking import Children


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    """Runs children that save and die."""
    children = Children()
    yield children
    children.close()


@pytest.fixture(scope="session")
def memory_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of fsyncs take no time there, and no test depends on them."""
    shared_memory = Path("/dev/shm")
    if not (shared_memory.is_dir() and os.access(shared_memory, os.W_OK)):
        yield tmp_path_factory.mktemp("faults")
        return
    directory = Path(tempfile.mkdtemp(prefix="onstep-faults-", dir=shared_memory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture(scope="session")
def saved_twice(memory_dir: Path) -> Callable[[str], Path]:
    """Gives, for a driver, a directory with checkpoints 5 and 10, not to be changed."""
    made: dict[str, Path] = {}

    def saved(driver: str) -> Path:
        if driver not in made:
            made[driver] = memory_dir / f"saved-{driver}"
            for step in (5, 10):
                DRIVERS[driver].save(made[driver], step, "a", FileStore())
        return made[driver]

    return saved


@pytest.fixture
def fresh_copy(saved_twice: Callable[[str], Path], memory_dir: Path) -> Callable[[str], Path]:
    """Gives a copy of its own of such a directory, each time it is called."""

    def copied(driver: str) -> Path:
        place = Path(tempfile.mkdtemp(dir=memory_dir)) / "checkpoints"
        return Path(shutil.copytree(saved_twice(driver), place))

    return copied


@pytest.fixture
def operations_of_a_save(fresh_copy: Callable[[str], Path]) -> Callable[[str, int], list[Operation]]:
    """Gives the operations of saving a step, edition "b", on top of checkpoints 5 and 10."""

    def operations(driver: str, step: int) -> list[Operation]:
        recorder = Recorder()
        DRIVERS[driver].save(fresh_copy(driver), step, "b", FileStore(recorder))
        return recorder.operations

    return operations
