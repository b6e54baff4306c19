"""Processes of this machine: does one still run, and is it stopped?"""

from __future__ import annotations

import os
import platform
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

State = Literal["runs", "stopped", "gone", "unknown"]


def this_host() -> str:
    """Names this machine and its table of processes: a pid means the same process wherever this is the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def birth_of(pid: int) -> int:
    """When a process of this machine began, in ticks since the machine did; 0 where the system does not tell.

    With the pid it names a process for good: numbers are given out again, also while a dead rank is looked for.
    """
    fields = _stat(pid)
    return int(fields[19]) if fields else 0


def state_of(pid: int, birth: int) -> State:
    """How a process of this machine stands; unknown where the system does not tell."""
    fields = _stat(pid)
    if fields is None:
        return "unknown"
    if not fields or fields[0] in "ZX" or int(fields[19]) != birth:
        return "gone"
    return "stopped" if fields[0] in "Tt" else "runs"


def end_process(pid: int, birth: int) -> None:
    """Kill a process of this machine that cannot end by itself."""
    if state_of(pid, birth) in ("runs", "stopped"):
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """The fields of `/proc/<pid>/stat` behind the name; [] without such a process, None without such a file."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return [] if Path("/proc/self/stat").exists() else None
    except OSError:
        return None
