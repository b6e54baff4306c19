"""Keeps on disk what a worker could not submit before it ended, for its next start."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from onstep.diloco.protocol.messages import Submit
from onstep.errors import PREEMPTED, CheckpointError, extra
from onstep.files.durability import replace_durably

DIRECTORY = "ONSTEP_DILOCO_WORK"
"""Environment variable with the directory of the files, in place of the user's data directory."""
_FORMAT = 1


class WorkKept(SystemExit):
    """Ends the process with exit code 75: the server is away, and the last steps are kept for the next start."""

    def __init__(self, message: str) -> None:
        super().__init__(PREEMPTED)
        self.message = message

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Unsent:
    """A submission and its body."""

    submit: Submit
    body: bytes | bytearray


def num_steps(unsent: Sequence[Unsent]) -> int:
    """The steps in submissions: of the fragment that has the most, as each step is in one of every fragment."""
    steps: Counter[int] = Counter()
    for one in unsent:
        steps[one.submit.fragment] += one.submit.steps
    return max(steps.values(), default=0)


def kept_path(server: str, worker_id: str) -> Path:
    """The file of a worker of a server."""
    chosen = os.environ.get(DIRECTORY)
    if chosen:
        directory = Path(chosen).expanduser()
    else:
        with extra("control", "DiLoCo requires platformdirs"):
            from platformdirs import user_data_path
        directory = user_data_path("onstep") / "diloco_worker"
    return directory / (re.sub(r"[^\w.-]", "_", f"{worker_id}@{server}")[:200] + ".work")


def write_work(path: Path, run_id: str, unsent: Sequence[Unsent]) -> None:
    """Write submissions, durably, in the order in which they are to be sent.

    Raises:
        OSError: if the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    submits = [{**asdict(one.submit), "bytes": len(one.body)} for one in unsent]
    head = json.dumps({"format": _FORMAT, "run_id": run_id, "submissions": submits}).encode()
    replace_durably(path, b"\n".join([head, b"".join(one.body for one in unsent)]), mode=0o600)


def read_work(path: Path) -> tuple[str, list[Unsent]] | None:
    """The run and the submissions of a file; None if there is none.

    Raises:
        CheckpointError: for a file that is damaged.
    """
    try:
        head, _, bodies = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    try:
        known = json.loads(head)
        if known["format"] != _FORMAT:
            raise ValueError("format")
        unsent, start = [], 0
        for saved in known["submissions"]:
            size = saved.pop("bytes")
            unsent.append(Unsent(Submit(**saved), bodies[start : start + size]))
            start += size
        if start != len(bodies):
            raise ValueError("size")
        return str(known["run_id"]), unsent
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}, the steps that this worker could not submit, is damaged; remove it to start without them."
        ) from error
