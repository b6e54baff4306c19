"""A data worker ends with its process, however early that is killed."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.forked_processes import Processes, lives
from tests.support.waiting import until

KILLED_AT_THE_START_OF_ITS_WORKER = """
import os, signal, time
from pathlib import Path
from torch.utils.data import DataLoader
from onstep.data.loaders import micro_batch_reader

micro_batch_reader.PARENT_SECONDS = 0.1
main = os.getpid()

def begin(worker_id):
    micro_batch_reader.outlive_the_group(worker_id)
    Path("worker").write_text(str(os.getpid()))
    os.kill(main, signal.SIGKILL)
    while os.getppid() == main:  # torch looks at its parent for the first time after this
        time.sleep(0.001)

next(iter(DataLoader(range(8), num_workers=1, worker_init_fn=begin, multiprocessing_context="fork")))
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes by Linux' proc")
def test_a_worker_whose_process_was_killed_before_torch_looks_ends_too(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(KILLED_AT_THE_START_OF_ITS_WORKER)
    codes = processes.run("tests.support.jobs.script_jobs", "script", tmp_path, {"script": "program.py"})
    assert codes == [-signal.SIGKILL]
    worker = int((tmp_path / "worker").read_text())
    try:
        until(lambda: not lives(worker), lambda: "the worker has outlived its process")
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
