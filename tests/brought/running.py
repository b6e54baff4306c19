"""Runs a program to its end, or kills it twice at random instants before."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.brought.outcomes import Outcome
from tests.brought.programs import Program

LIMIT_SECONDS = 240
ENVIRONMENT = {
    "CI": "1",  # trl reports each start to its makers otherwise
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",  # transformers was compiled when it was installed, and so is a package of ours
    "PYTHONHASHSEED": "0",  # GLiNER draws from sets of words
}


class Failed(Exception):
    """A program ended with an error."""


def run(program: Program, door: str, here: Path, output: Path) -> Outcome:
    """Run a program once, with caches of its own, to its end.

    Raises:
        Failed: with the end of what it printed.
    """
    started = time.perf_counter()
    with (_log(output)).open("w") as log:
        process = _start(program, door, here, output, log)
        try:
            code: object = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            code = f"nothing in {LIMIT_SECONDS} seconds"
        finally:
            _kill(process)
    seconds = time.perf_counter() - started
    printed = _log(output).read_text(errors="replace")
    if code:
        raise Failed(f"{program.name} under {door} ended with {code}:\n{printed[-2000:]}")
    return Outcome(output, printed, seconds)


def run_killed(
    program: Program, here: Path, output: Path, whole: Outcome, source: random.Random, kills: int = 2
) -> tuple[Outcome, list[int]]:
    """Run under `onstep run`, kill it at random instants of its training, and run the same command to its end.

    Each kill waits for a record of its own process and for a checkpoint, so that what follows continues from one.

    Args:
        whole: its uninterrupted run, whose duration tells how long to wait.

    Returns:
        The end, and the number of records that there were at each kill.
    """
    reached = []
    for _ in range(kills):
        with (_log(output)).open("w") as log:
            process = _start(program, "onstep", here, output, log)
            try:
                before = _lines(output)
                _wait_for_training(process, output, before)
                _wait(process, source.uniform(0, 0.5 / kills) * whole.summary().get("train_runtime", 1.0))
                if process.poll() is not None:
                    raise Failed(f"{program.name} ended with {process.returncode} before kill {len(reached) + 1}")
            finally:
                _kill(process)
        reached.append(_lines(output))
    return run(program, "onstep", here, output), reached


def _wait_for_training(process: subprocess.Popen[bytes], output: Path, before: int) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if _lines(output) > before and any(output.glob("checkpoint-*/manifest.json")):
            return
        time.sleep(0.01)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def _lines(output: Path) -> int:
    """The records that a run has kept so far."""
    path = output / "record.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _start(program: Program, door: str, here: Path, output: Path, log: object) -> subprocess.Popen[bytes]:
    caches = {"HF_HOME": os.fspath(output.with_name(f"{output.name}-caches"))}
    return subprocess.Popen(
        program.command(door, here, output),
        cwd=here,
        env={**os.environ, **ENVIRONMENT, **caches},
        stdout=log,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End all processes of a program at once, whatever they do."""
    if process.poll() is not None:
        return
    whole = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]  # torchrun's, too
    for one in whole:
        with suppress(psutil.NoSuchProcess):
            one.send_signal(signal.SIGKILL)
    process.wait()
    psutil.wait_procs(whole[1:], timeout=LIMIT_SECONDS)


def _log(output: Path) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    return output.with_name(f"{output.name}.log")
