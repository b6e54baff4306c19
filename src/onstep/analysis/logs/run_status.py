"""Determines whether a run is live, from its run.json and the locks that a live run holds."""

from __future__ import annotations

import os
import re
import shlex
import socket
from pathlib import Path
from typing import Any

from onstep.errors import DataError
from onstep.files.bounded_reading import read_bytes, read_json

_RUNNING = ("running", "again")
_LOCKS = Path("/proc/locks")
_LOCK_BYTES = 1000
"""Limit for the lock file of a run, which names its process."""


def ending_of(log_path: Path) -> str | None:
    """The end of a log's run, in words; None while it is running or if unknown.

    The run.json of a killed run says "running" forever; on the machine where it ran, its released lock shows that it
    has ended.
    """
    run_json = run_record(log_path.parent)
    status = run_json.get("status")
    if status is not None and status not in _RUNNING:
        return f"the run {_VERBS.get(str(status), str(status))}"
    if status is not None and _is_held(log_path) is False:
        return "the run's process is gone without ending the run, as after a kill; the same command resumes it"
    return None


def status_of(log_path: Path) -> str | None:
    """The status of the run of a log, in a word or two; None without a run.json that contains it.

    A run without a recorded end is "killed" if its process is gone, "running" if it exists, and "running or killed" if
    unknown, such as on a machine other than the one where it ran.
    """
    status = run_record(log_path.parent).get("status")
    if status not in _RUNNING:
        return None if status is None else str(status)
    return {True: "running", False: "killed", None: "running or killed"}[_is_held(log_path)]


def _is_held(log_path: Path) -> bool | None:
    """Whether the run's process exists; None if unknown."""
    lock = log_path.parent / ".run.lock"
    try:
        holder = read_bytes(lock, _LOCK_BYTES).decode("utf-8", errors="replace")
    except (OSError, DataError):
        return None
    was_here = re.fullmatch(rf"process \d+ on {re.escape(socket.gethostname())}\s*", holder) is not None
    return is_locked(lock) if was_here else None


def is_locked(path: Path) -> bool | None:
    """Whether a process of this machine holds a lock on the file; None if the system does not provide this.

    Reads the system's lock table, since trying to lock the file could keep a run from starting at that time.
    """
    try:
        status, table = path.stat(), _LOCKS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(fields[-3:-2] == [device] for fields in map(str.split, table.splitlines()))


_VERBS = {
    "completed": "completed",
    "stopped": "was stopped",
    "paused": "exited before its end",
    "preempted": "was preempted",
    "failed": "failed",
}


def run_record(directory: Path) -> dict[str, Any]:
    """The content of the `run.json` in `directory`; {} if there is no readable one."""
    try:
        content = read_json(directory / "run.json")
    except (OSError, DataError):
        return {}
    return content if isinstance(content, dict) else {}


def rewind_command(directory: str | Path, step: int | str = "{step}") -> str | None:
    """The command that shows a step of a run, as a shell reads it; a page puts the number in place of `{step}`.

    A Trainer's run has its model and data from a script, which the reader names. None without a record of a run.
    """
    record = run_record(Path(directory))
    if not isinstance(record.get("config"), dict):
        return None
    script = " --script YOUR_SCRIPT.py" if record.get("layout") == "hugging_face" else ""
    return f"onstep rewind {shlex.quote(str(directory))} {step}{script}"
