"""What a process knows about its allocation, with and without SLURM's commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from onstep.slurm.allocation import Allocation

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}


def test_the_facts_of_a_job_and_of_a_task_of_an_array() -> None:
    assert Allocation.of_process({}) is None
    assert Allocation.of_process(JOB) == Allocation("7", "node[1-2]", 0)
    array = {"SLURM_ARRAY_JOB_ID": "6", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "3"}
    assert Allocation.of_process({**JOB, **array}) == Allocation("6_0", "node[1-2]", 3)


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `squeue` that prints what the file says, in place of any other."""
    command = tmp_path / "squeue"
    command.write_text(f"#!/bin/sh\n. {tmp_path}/answer\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "9000000000")
    return tmp_path / "answer"


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("echo 2026-11-29T07:55:58", 1795938958.0),
        ("echo NONE", None),  # without a limit
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", 9e9),
    ],
)
def test_squeue_says_when_the_allocation_ends(answering: Path, answer: str, end: float | None) -> None:
    answering.write_text(answer)
    assert Allocation("7", "node1", 0).ends_at() == end


@pytest.mark.parametrize(("variable", "end"), [("9000000000", 9e9), ("1000", None), ("", None), ("soon", None)])
def test_without_squeue_the_environment_says_it(
    variable: str, end: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_END_TIME", variable)
    assert Allocation("7", "node1", 0).ends_at() == end
