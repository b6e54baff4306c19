"""Whether more can come to a run's log: from run.json, and from the locks that a live run holds."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

_RUNNING = ("running", "again")
_LOCKS = Path("/proc/locks")


def ending_of(log_path: Path) -> str | None:
    """How the run of a log ended, in words; None while it goes on, or where nothing tells.

    A run whose process was killed says "running" for ever; on the machine it ran on, that nobody holds its lock any
    more tells otherwise.
    """
    run_json = run_record(log_path.parent)
    status = run_json.get("status")
    if status is not None and status not in _RUNNING:
        return f"the run {_VERBS.get(str(status), str(status))}"
    if status is not None and _is_held(log_path) is False:
        return "the run's process is gone without an end, as after a kill; the same command may continue it"
    return None


def status_of(log_path: Path) -> str | None:
    """How the run of a log stands, in a word or two; None where it has no run.json that says so.

    For a run that never said that it ended: "killed" where its process is gone, "running" where it is there, and
    "running or killed" where nothing tells, as on another machine than the one it ran on.
    """
    status = run_record(log_path.parent).get("status")
    if status not in _RUNNING:
        return None if status is None else str(status)
    return {True: "running", False: "killed", None: "running or killed"}[_is_held(log_path)]


def _is_held(log_path: Path) -> bool | None:
    """Whether the run's process is there; None where nothing tells."""
    lock = log_path.parent / ".run.lock"
    try:
        holder = lock.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    was_here = re.fullmatch(rf"process \d+ on {re.escape(socket.gethostname())}\s*", holder) is not None
    return is_locked(lock) if was_here else None


def is_locked(path: Path) -> bool | None:
    """Whether a process of this machine has the file locked; None where the system does not tell.

    Reads the system's table: trying the lock could keep a run from starting at that moment.
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
    "paused": "left before its end",
    "preempted": "was preempted",
    "failed": "failed",
}


def run_record(folder: Path) -> dict[str, Any]:
    """The content of the `run.json` in `folder`; {} where there is none that can be read."""
    try:
        content = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
