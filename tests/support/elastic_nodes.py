"""Nodes of an elastic launch, as processes of this machine that can be killed, and what their ranks have trained on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.waiting import PATIENCE

WRITER = """\
import json, os, time
from pathlib import Path
from onstep import Callback


class Writer(Callback):
    '''Appends the samples of each step of this rank to a file; steps last PACE seconds until `hurry` is there.'''

    def on_train_step_end(self, context):
        one = {"step": context.step + 1, "ids": sum(context.sample_ids, []), "time": time.time()}
        one |= {"size": int(os.environ.get("WORLD_SIZE", 1)), "attempt": os.environ.get("MASTER_PORT", "alone")}
        with Path(os.environ["SEEN"], f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps(one) + chr(10))
        time.sleep(0.0 if Path(os.environ["SEEN"], "..", "hurry").exists() else float(os.environ["PACE"]))
"""


@dataclass(frozen=True)
class Seen:
    """What one rank has trained on in one step."""

    step: int
    ids: list[int]
    size: int
    attempt: str
    time: float


class Node:
    """One `onstep launch` and its ranks.

    Args:
        process: the launch.
        memory: the directory that stands for the memory of the machine, if the test has any.
    """

    def __init__(self, process: subprocess.Popen[bytes], memory: Path | None = None) -> None:
        self.process, self.memory = process, memory

    def ranks(self) -> list[psutil.Process]:
        """The ranks that it has started."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children()
        return []

    def kill_rank(self) -> bool:
        """Kill a rank by SIGKILL; False if it has none."""
        ranks = self.ranks()
        for rank in ranks[:1]:
            rank.kill()
        return bool(ranks)

    def kill(self) -> None:
        """Kill the launch and its ranks, data workers included, as if the machine were gone."""
        self.process.send_signal(19)
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    one.kill()
        self.process.kill()
        self.process.wait()
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)


class Cluster:
    """Nodes that meet in a file, with one rank each.

    Args:
        directory: where everything is written.
        least: the number of nodes that is enough.
        most: the largest number of nodes.
        words: the words after `onstep train`.
        pace: how many seconds a step lasts at least, until `hurry`.
        memory: a directory on a file system in memory, in which each node gets one of its own.
    """

    def __init__(
        self, directory: Path, least: int, most: int, words: list[str], pace: float, memory: Path | None = None
    ) -> None:
        self.directory, self._words, self._memory = directory, words, memory
        self._options = [f"--nnodes={least}:{most}", "--nproc=1", "--max-restarts=100", f"--rdzv={directory}/rdzv"]
        self._options += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=5"]
        (directory / "seen").mkdir(parents=True)
        (directory / "writer.py").write_text(WRITER)
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
        self._environment |= {"SEEN": f"{directory}/seen", "PACE": str(pace)}
        self._started = 0

    def start(self) -> Node:
        """Start a node."""
        self._started += 1
        own = ["--import", f"{self.directory}/writer.py", "callbacks=[writer:Writer]"]
        memory = None if self._memory is None else self._memory / f"node-{self._started}"
        if memory is not None:
            memory.mkdir()
            own.append("checkpoint.memory_dir=$MEMORY_OF_NODE")
        command = [sys.executable, "-m", "onstep", "launch", *self._options, "--", "train", *self._words, *own]
        with (self.directory / f"node-{self._started}.txt").open("wb") as output:
            process = subprocess.Popen(
                command, env=self._environment | {"MEMORY_OF_NODE": f"{memory}"}, stdout=output, stderr=output
            )
        return Node(process, memory)

    def hurry(self) -> None:
        """Let the rest of the steps last as long as they need."""
        (self.directory / "hurry").touch()

    def seen(self) -> list[Seen]:
        """What all ranks have trained on, in order of time."""
        lines = [line for path in (self.directory / "seen").iterdir() for line in path.read_text().split("\n")[:-1]]
        return sorted((Seen(**json.loads(line)) for line in lines), key=lambda one: one.time)

    def wait_for(self, size: int, steps: int, *, after: float) -> None:
        """Wait until so many steps have been trained by that number of ranks after a time."""

        def is_so() -> bool:
            found = [one for one in self.seen() if one.time > after]
            return bool(found) and found[-1].size == size and len({one.step for one in found}) >= steps

        wait(is_so, self.said)

    def said(self) -> str:
        """The last lines of all nodes."""
        texts = {path.name: path.read_text()[-1500:] for path in sorted(self.directory.glob("node-*.txt"))}
        return "\n".join(f"{name}:\n{text}" for name, text in texts.items())

    def trained(self) -> dict[int, list[int]]:
        """The samples of each step that counts: the last attempt's, as others were trained again from a checkpoint."""
        by_attempt: dict[int, dict[str, list[Seen]]] = defaultdict(lambda: defaultdict(list))
        for one in self.seen():
            by_attempt[one.step][one.attempt].append(one)
        last = {step: list(attempts.values())[-1] for step, attempts in sorted(by_attempt.items())}
        return {step: sorted(id_ for one in rows for id_ in one.ids) for step, rows in last.items()}


def wait(condition: Callable[[], bool], said: Callable[[], str], seconds: float = 2 * PATIENCE) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, said()
        time.sleep(0.05)
