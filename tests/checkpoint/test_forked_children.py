"""Checkpoints in forked children: a process that has verified one can fork children that verify it too."""

from __future__ import annotations

from pathlib import Path

import torch

from onstep.checkpoint import FileStore, write_tensors
from tests.support.forked_processes import Processes, output_of
from tests.support.small_checkpoints import FILES, write_checkpoint

JOBS = "tests.support.jobs.fork_jobs"


def test_children_and_data_workers_verify_what_their_parent_has_verified(processes: Processes, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "root", 10, {**FILES, "model/large": bytes(17 * 1024**2)})
    assert processes.results(JOBS, "verify", tmp_path, {"path": str(path)}, ranks=1) == [[0, 0, 0, 10]]


def test_children_read_tensors_that_their_parent_has_read(processes: Processes, tmp_path: Path) -> None:
    with FileStore().open(tmp_path / "flags.safetensors") as file:
        write_tensors(file, {"flags": torch.ones(4 * 1024**2, dtype=torch.bool)})
    settings = {"path": str(tmp_path / "flags.safetensors")}
    assert processes.results(JOBS, "read", tmp_path, settings, ranks=1) == [[0]]


def test_children_resume_what_their_parent_has_resumed(
    processes: Processes, tmp_path: Path, corpus: Path, token_cache: Path
) -> None:
    settings = {"corpus": str(corpus), "cache": str(token_cache)}
    codes = processes.run(JOBS, "resume", tmp_path, settings)
    assert codes == [0], output_of(tmp_path)
    assert (tmp_path / "result-0.json").read_text() == "[0, 0]", output_of(tmp_path)
