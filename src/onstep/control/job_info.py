"""Describes where a job is (what `endpoint.json` holds) and whether it lives, which recycled ids cannot fake."""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from onstep.errors import extra
from onstep.http.addresses import authority, reachable

_STARTED_BEFORE_SECONDS = 10.0
"""A process that was created longer than this after the job's start is another one; for files of other programs."""
_CLOCK_STEP_SECONDS = 1.0
"""A process's creation time is counted from the boot time, which moves when the clock is set."""


@dataclass(frozen=True)
class JobInfo:
    """A job of this user, as its `endpoint.json` describes it."""

    job_id: str
    """The job: its id, the beginning of one, or the name of its run."""
    host: str
    """The address that its server is bound to."""
    port: int
    """The port of the job's server on its machine; None with a Unix socket."""
    pid: int | None
    """The process of rank 0."""
    started_at: float | None
    """Unix time in seconds."""
    output_dir: str | None = None
    """The directory of the run."""
    logging_dir: str | None = None
    hostname: str = ""
    """The machine that it runs on; empty if unknown."""
    uds: str | None = None
    """Path of its Unix socket, in place of host and port."""
    process_started_at: float | None = None
    """Creation time of its process, Unix time in seconds."""
    boot_id: str | None = None
    """Identifies the boot of its machine."""

    @property
    def endpoint_url(self) -> str:
        """Base URL of its server; for a Unix socket, one whose host is ignored."""
        if self.uds is not None:
            return "http://localhost"
        return f"http://{authority(reachable(self.host), self.port)}"

    @classmethod
    def of_this_process(cls, job_id: str, **values: Any) -> JobInfo:
        """The description of a job of this process; `values` are further fields.

        Args:
            job_id: the job: its id, the beginning of one, or the name of its run.
        """
        psutil = _psutil()
        started = {"hostname": socket.gethostname(), "process_started_at": psutil.Process().create_time()}
        given = {"host": "127.0.0.1", "port": 0, "started_at": time.time(), **started, "boot_id": boot_id(), **values}
        return cls(job_id=job_id, pid=os.getpid(), **given)

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> JobInfo:
        """Read what `to_dict` gives. Missing, unknown and wrongly typed keys are tolerated; `job_id` is required.

        Args:
            content: the content of the job's file in the registry.

        Raises:
            KeyError: without a `job_id`.
        """
        given: dict[str, Any] = {name: _fitting(name, content.get(name)) for name in _KINDS}
        given["job_id"] = str(content["job_id"])
        given["host"] = given["host"] or "127.0.0.1"
        given["port"], given["hostname"] = given["port"] or 0, given["hostname"] or ""
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON."""
        return asdict(self)


_TEXTS = frozenset({"job_id", "host", "output_dir", "logging_dir", "hostname", "uds", "boot_id"})
_KINDS: dict[str, type] = {
    one.name: str if one.name in _TEXTS else int if one.name in ("port", "pid") else float for one in fields(JobInfo)
}


def _fitting(name: str, value: Any) -> Any:
    kind = _KINDS[name]
    fits = isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)
    if fits and kind is float:
        fits = -1e18 < value < 1e18 and math.isfinite(value)
    if fits and kind is int:
        fits = 0 <= value < 2**31
    return value if fits else None


def is_here(info: JobInfo) -> bool:
    """Whether a job runs, or ran, on this machine."""
    return info.hostname in ("", socket.gethostname())


def is_alive(info: JobInfo) -> bool:
    """Whether the process of a job lives on this machine. Another process with the same id does not count.

    False for a job on another machine, about which nothing is known; see `is_here`.
    """
    if not is_here(info) or (info.boot_id is not None and info.boot_id != boot_id()):
        return False
    if info.process_started_at is None:
        return is_endpoint_pid_alive(info.pid, info.started_at)
    created = _created(info.pid)
    return created is not None and abs(created - info.process_started_at) < _CLOCK_STEP_SECONDS


def is_endpoint_pid_alive(pid: int | None, started_at: float | None) -> bool:
    """Whether a process lives, and was created no later than 10 s after `started_at`, if given. A zombie is dead.

    Args:
        pid: the process id.
    """
    created = _created(pid)
    return created is not None and (started_at is None or created <= started_at + _STARTED_BEFORE_SECONDS)


def _created(pid: int | None) -> float | None:
    """When a process was created; None if it is dead."""
    psutil = _psutil()
    if pid is None or pid <= 0:
        return None
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            is_dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            created: float = process.create_time()
    except psutil.Error:
        return None
    return None if is_dead else created


@cache
def boot_id() -> str | None:
    """Identifies the boot of this machine; None where the system does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _psutil() -> Any:
    with extra("control", "Controlling jobs requires psutil"):
        import psutil
    return psutil
