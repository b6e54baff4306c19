"""A run whose files are in an object store continues on a machine that has none of them, bit for bit."""

from __future__ import annotations

from pathlib import Path

from tests.support.forked_processes import Processes
from tests.support.mirrored_runs import MirroredRuns, check_that_an_empty_machine_continues


def test_an_empty_machine_continues_bit_for_bit(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    runs = MirroredRuns(processes, corpus, token_cache, f"file://{tmp_path}/store")
    check_that_an_empty_machine_continues(runs, tmp_path)
