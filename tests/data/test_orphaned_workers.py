"""A data worker ends with its process, however early that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.forked_processes import lives

KILLED_AT_THE_START_OF_ITS_WORKER = """
import os, signal, sys, time
from pathlib import Path
from torch.utils.data import DataLoader
from onstep.data.loaders import micro_batch_reader

micro_batch_reader.PARENT_SECONDS = 0.1
main = os.getpid()

def begin(worker_id):
    micro_batch_reader.outlive_the_group(worker_id)
    Path(sys.argv[1]).write_text(str(os.getpid()))
    os.kill(main, signal.SIGKILL)
    while os.getppid() == main:  # torch looks at its parent for the first time after this
        time.sleep(0.001)

next(iter(DataLoader(range(8), num_workers=1, worker_init_fn=begin, multiprocessing_context="fork")))
"""


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by Linux' proc")
def test_a_worker_whose_process_was_killed_before_torch_looks_ends_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(KILLED_AT_THE_START_OF_ITS_WORKER)
    ended = subprocess.run([sys.executable, str(program), str(tmp_path / "worker")], timeout=120)
    assert ended.returncode == -signal.SIGKILL
    worker = int((tmp_path / "worker").read_text())
    deadline = time.monotonic() + 20
    try:
        while lives(worker):
            assert time.monotonic() < deadline, "the worker has outlived its process"
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
