"""Determines what a run's process is: its machine, the versions of its libraries, and the revision of its code."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from onstep.slurm.allocation import Allocation

_LIBRARIES = ("onstep", "torch", "numpy", "transformers")
_GPU_FILES = Path("/proc/driver/nvidia/gpus")
_CPU_FILE = Path("/proc/cpuinfo")
_REVISION = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_FILTERS = ("config", "--null", "--name-only", "--get-regexp", r"^filter\.")
_FILTER_OFF = ("clean=", "process=", "required=false")
_STATUS = ("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
_MOST_STATUS = 1 << 20


def provenance() -> dict[str, Any]:
    """The entries `versions`, `machine`, in a git repository `code`, and in a SLURM job `slurm` of run.json.

    The code is that of the working directory. Nothing here can fail a run, and no device is initialized.
    """
    found: dict[str, Any] = {"versions": versions(), "machine": machine()}
    try:
        code = code_revision(Path.cwd())
    except OSError:  # the working directory was deleted
        code = {}
    allocation = Allocation.of_process()
    found |= {"code": code} if code else {}
    return found | ({} if allocation is None else {"slurm": allocation.facts})


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that are installed and decide how a run goes."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return {**found, "torch": torch.__version__}  # with its local part, such as +cu130


def machine() -> dict[str, Any]:
    """Host name, system, processor, number of CPUs that the process may use, and names of the GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Any] = {
        "host": socket.gethostname(),
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cpus": usable,
    }
    gpus = _gpus()
    return {**found, "gpus": gpus} if gpus else found


def code_revision(directory: Path, *, timeout_seconds: float = 2.0) -> dict[str, Any]:
    """The git revision of the repository that `directory` is in, its branch, and whether tracked files were changed.

    Runs git read-only, without any program that the repository's configuration names. Files that are not tracked do not
    count, since the run's own directory may be one of them. A file that git would first pass through a filter, such as
    Git LFS, counts as changed once its time differs from the index's.

    Returns:
        {"revision", "branch", "dirty"}, without a branch for a detached head; {} without a repository, a commit or git.
    """
    if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
        return {}
    try:
        settings = _without_filters(_git(directory, timeout_seconds, *_FILTERS))
        status = _git(directory, timeout_seconds, *settings, *_STATUS)
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    return _parsed(status[:_MOST_STATUS])


def _git(directory: Path, timeout_seconds: float, *words: str) -> str:
    """The output of a git command that starts no monitor, locks nothing and fetches no missing object.

    Raises:
        OSError, subprocess.SubprocessError: if it cannot be started, fails with a code above 1, or lasts longer.
    """
    done = subprocess.run(
        ["git", "-C", str(directory), "-c", "core.fsmonitor=false", *words],
        capture_output=True,
        check=False,
        stdin=subprocess.DEVNULL,
        timeout=timeout_seconds,
        env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""},
    )
    if done.returncode not in (0, 1):
        done.check_returncode()
    return os.fsdecode(done.stdout)


def _without_filters(keys: str) -> list[str]:
    """Options of git that switch off the filters that these configuration keys, each followed by NUL, define.

    Git would run them to compare a file whose time has changed, no matter who wrote the repository's configuration.

    Raises:
        ValueError: for a filter that no option can name.
    """
    names = {key.rpartition(".")[0] for key in keys.split("\0")[:-1]}
    if any("=" in name for name in names):
        raise ValueError("the name of a filter contains '='")
    return [word for name in sorted(names) for end in _FILTER_OFF for word in ("-c", f"{name}.{end}")]


def _parsed(status: str) -> dict[str, Any]:
    """The output of `git status --porcelain=v2 --branch`."""
    lines = status.splitlines()
    headers = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# ") and line.count(" ") > 1)
    revision, branch = headers.get("branch.oid", ""), headers.get("branch.head", "(detached)")
    if not _REVISION.fullmatch(revision):
        return {}
    is_dirty = any(not line.startswith("#") for line in lines)
    named = {} if branch == "(detached)" else {"branch": branch}
    return {"revision": revision, **named, "dirty": is_dirty}


def _processor() -> str:
    try:
        with _CPU_FILE.open(encoding="utf-8", errors="replace") as file:
            names = (line.partition(":")[2].strip() for line in file if line.startswith("model name"))
            return next(names, "") or platform.machine()
    except OSError:
        return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    """The names of the machine's GPUs, without initializing CUDA, which would be inherited by forked processes."""
    try:
        files = sorted(_GPU_FILES.glob("*/information"))
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    except OSError:
        return []
    return [match[1] for text in texts if (match := re.search(r"^Model:\s*(.+?)\s*$", text, re.MULTILINE))]
