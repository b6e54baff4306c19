"""What the kernel saw of a save is what the store logged: nothing writes to the checkpoints by another way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.faults

SYSTEM_CALLS = (
    "openat,open,openat2,creat,write,pwrite64,writev,pwritev,pwritev2,sendfile,copy_file_range,fsync,fdatasync,"
    "sync_file_range,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,truncate,ftruncate,fallocate,link,"
    "linkat,symlink,symlinkat,chmod,fchmod,fchmodat,mknod,mknodat,msync"
)
KINDS = {"pwrite64": "write", "renameat": "rename", "renameat2": "rename", "unlinkat": "unlink", "mkdirat": "mkdir"}
CALL = re.compile(r"(?P<call>\w+)\((?P<arguments>.*)\)\s+= (?P<result>-?\d+|\?)")
DESCRIPTOR = re.compile(r"\d+<(?P<path>[^>]*)>")
STRING = re.compile(r'"(?P<path>(?:[^"\\]|\\.)*)"')

Seen = tuple[str, str, str, int]


def why_not() -> str | None:
    """Why this machine cannot trace; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-f", "--seccomp-bpf", "-y", "-e", "trace=openat", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else f"strace may not trace here: {tried.stderr.decode()[:200]}"


def whole_lines(trace: str) -> Iterator[str]:
    """Calls in the order in which they began, where strace had to split one between two lines put together again."""
    lines: list[str] = []
    unfinished: dict[str, int] = {}
    for line in trace.splitlines():
        process, _, call = line.strip().partition(" ")
        call = call.strip()
        if call.endswith("<unfinished ...>"):
            unfinished[process] = len(lines)
            lines.append(call.removesuffix("<unfinished ...>").rstrip())
        elif call.startswith("<..."):
            lines[unfinished.pop(process)] += call.partition("resumed>")[2]
        else:
            lines.append(call)
    yield from lines


def changes(trace: str, root: Path) -> Iterator[Seen]:
    """The calls that change something below the directory, or make it durable: kind, path, target, bytes."""
    for line in whole_lines(trace):
        match = CALL.match(line)
        if match is None or str(root) not in line:
            continue
        seen = change(match["call"], match["arguments"], int(match["result"]))
        if seen is not None and seen[1].startswith(str(root)):
            yield seen


def change(call: str, arguments: str, result: int) -> Seen | None:
    """One call as an operation; None for one that only reads."""
    assert result >= 0, f"{call}({arguments}) failed"
    descriptor = DESCRIPTOR.match(arguments)
    paths = [match["path"] for match in STRING.finditer(arguments)]
    if call.startswith("open") or call == "creat":
        is_writing = call == "creat" or re.search("O_CREAT|O_TRUNC|O_WRONLY|O_RDWR|O_APPEND", arguments)
        return ("open", paths[0], "", 0) if is_writing else None
    if call in ("fsync", "fdatasync"):
        assert descriptor is not None
        return "fsync", descriptor["path"], "", 0
    if descriptor is not None:
        return KINDS.get(call, call), descriptor["path"], "", result
    target = paths[1] if call.startswith("rename") else ""
    return KINDS.get(call, call), paths[0], target, 0


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize(
    ("driver", "step"),
    [
        ("manager", 20),
        pytest.param("manager", 10, marks=pytest.mark.slow),
        pytest.param("manager-async", 20, marks=pytest.mark.slow),
        pytest.param("direct", 10, marks=pytest.mark.slow),
    ],
)
def test_a_save_makes_no_system_call_that_the_store_does_not_know_of(
    driver: str, step: int, fresh_copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root, trace = fresh_copy(driver), tmp_path / "trace"
    strace = [
        "strace",
        "-f",
        "--seccomp-bpf",
        "-y",
        "-s",
        "0",
        "-e",
        f"trace={SYSTEM_CALLS}",
        "-e",
        "signal=none",
        "-o",
        str(trace),
    ]
    command = [*strace, sys.executable, "-m", "tests.support.faults.child_save", driver, str(root), str(step), "b"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    logged = [(kind.removesuffix("_dir"), *rest) for kind, *rest in json.loads(done.stdout)]
    assert logged
    assert list(changes(trace.read_text(), root)) == logged
