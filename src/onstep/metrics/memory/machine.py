"""Tells how much memory this machine, or its container, lets a process have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")


@dataclass(frozen=True)
class MachineMemory:
    """Bytes of host memory."""

    limit: int
    """Memory and swap space, or the limit of the control group if that is lower: no process can have more."""
    available: int
    """What can be had now without swapping."""


def machine_memory(root: Path = _ROOT) -> MachineMemory | None:
    """The memory of this machine; None where the system does not say.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    values = _meminfo(root)
    if "MemTotal" not in values:
        total = _physical_bytes()
        return None if total is None else MachineMemory(total, total)
    limit = values["MemTotal"] + values.get("SwapTotal", 0)
    available = values.get("MemAvailable", values["MemTotal"])
    for largest, used in _control_groups(root):
        limit, available = min(limit, largest), min(available, max(0, largest - used))
    return MachineMemory(limit, available)


def _meminfo(root: Path) -> dict[str, int]:
    values = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        size = rest.split()
        if size and size[0].isdigit():
            values[name] = int(size[0]) * 1024
    return values


def _control_groups(root: Path) -> Iterator[tuple[int, int]]:
    """The limit and the use of each control group of this process that has a limit, versions 1 and 2.

    The files of a container's own group are at the top of its mount.
    """
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current") if not controllers else _VERSION_1
        place = top / path.lstrip("/")
        for directory in (place, *place.parents):
            limit, used = (_read(directory / name).strip() for name in names)
            if limit.isdigit() and int(limit) < _UNLIMITED:
                yield int(limit), int(used) - _reclaimable(directory) if used.isdigit() else 0
            if directory == top:
                break


def _reclaimable(group: Path) -> int:
    """Bytes of files that a group has read and that are freed when it needs memory."""
    lines = dict(line.split(maxsplit=1) for line in _read(group / "memory.stat").splitlines() if " " in line)
    return int(lines.get("total_inactive_file", lines.get("inactive_file", 0)))


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
_UNLIMITED = 2**60
"""What version 1 has for no limit is the largest number of pages."""


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _physical_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
