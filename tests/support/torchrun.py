"""Ranks under `torchrun`: fresh processes, as users start them, or forked ones, which need not import torch again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.forked_processes import Processes

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def start(
    words: list[str], directory: Path, *, ranks: int = 2, options: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start `torchrun <words>` in `directory`; standard output and error come together."""
    directory.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [*LAUNCHER, f"--nproc-per-node={ranks}", *options, *words],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def finish(
    words: list[str], directory: Path, *, ranks: int = 2, options: tuple[str, ...] = (), **environment: str
) -> tuple[int, str]:
    """Run `torchrun <words>` to its end; the exit code and what was printed."""
    with start(words, directory, ranks=ranks, options=options, **environment) as process:
        said, _ = process.communicate(timeout=240)
    return process.returncode, said


def finish_forked(
    processes: Processes, words: list[str], directory: Path, *, options: tuple[str, ...] = (), **environment: str
) -> tuple[int, str]:
    """Run `torchrun <words>` on two ranks that it forks; the exit code and what was printed.

    Where a rank dies, torch ends the others otherwise than fresh ones; a test that is about this takes `finish`.
    """
    launch = ["--standalone", "--nproc-per-node=2", "--start-method=fork", *options, "--run-path"]
    module = str(Path(__file__).parent / "scripts" / "module.py")
    settings = {"words": [*launch, module, *words[1:]], "environment": environment}
    [child] = processes.start("tests.support.jobs.torchrun_jobs", "torchrun", directory, settings)
    try:
        return child.wait(240), (directory / "rank-0.out").read_text()
    finally:
        child.end()


def job(jobs: str, name: str, settings: dict[str, Any]) -> list[str]:
    """The words that start `job_<name>(settings)` of a module of jobs."""
    return ["-m", "tests.support.scripts.rank", jobs, name, json.dumps(settings)]
