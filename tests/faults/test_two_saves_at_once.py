"""Two live processes that save into one directory do not touch each other's files; what a dead one left is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from onstep.checkpoint.storage.store import FileStore
from onstep.checkpoint.storage.transaction import SaveTransaction, sweep
from tests.support.faults.fault_saves import DRIVERS, debris, what_is_wrong

pytestmark = pytest.mark.faults


def test_a_sweep_spares_a_live_save_and_removes_it_once_its_process_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    command = [sys.executable, "-m", "tests.support.faults.child_live_save", str(root), "20"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    directory, worker = child.stdout.readline().split()
    try:
        DRIVERS["direct"].save(root, 20, "a", FileStore())
        assert sweep(FileStore(), root) == []
        assert (Path(directory) / "part").read_bytes() == b"half of it"
    finally:
        child.kill()
        child.communicate()
    try:
        os.kill(int(worker), 0)
        assert Path(directory) in sweep(FileStore(), root), "a worker that lives on must not hold the lock"
    finally:
        os.kill(int(worker), signal.SIGKILL)
    assert not debris(root)
    assert not what_is_wrong(root, DRIVERS["direct"], {(20, "a")}, pointer=20)


def test_a_sweep_spares_a_live_save_of_its_own_process(tmp_path: Path) -> None:
    transactions = [SaveTransaction(FileStore(), tmp_path, 20) for _ in range(2)]
    for transaction in transactions:
        transaction.prepare()
    assert sweep(FileStore(), tmp_path) == []
    assert transactions[0].directory != transactions[1].directory
    assert all(transaction.directory.is_dir() for transaction in transactions)
    for transaction in transactions:
        transaction.abandon()
    assert list(tmp_path.iterdir()) == []
