"""A run whose workers are in network namespaces of their own, each with a cable to the server's that can be unplugged.

Run it in new user, network and mount namespaces, `unshare -Urnm python -m tests.support.diloco.namespaces DIRECTORY`;
it prints its counts as JSON.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.support.diloco.fault_run import JOBS, FaultRun, minority_is_left
from tests.support.forked_processes import Processes

UNSHARE = ("unshare", "--user", "--map-root-user", "--net", "--mount")


def are_available() -> bool:
    """Whether this machine lets us make them."""
    if not all(shutil.which(one) for one in ("unshare", "ip")):
        return False
    script = "mount -t tmpfs tmpfs /run && ip netns add probe && ip link add p0 type veth peer name p1 netns probe"
    return subprocess.run([*UNSHARE, "sh", "-c", script], capture_output=True, check=False).returncode == 0


class NamespaceRun(FaultRun):
    """Worker `i` is at 10.77.i.2, its server at 10.77.i.1."""

    def place_of(self, index: int) -> dict[str, object]:
        return {"address": f"10.77.{index}.1:{self.port}", "namespace": f"w{index}"}

    def cut(self, indices: Iterable[int], is_cut: bool) -> None:
        for index in indices:
            _ip(f"link set v{index} {'down' if is_cut else 'up'}")


def main(directory: Path) -> None:
    """Lay the cables, start the processes, and leave a minority."""
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
    _ip("link set lo up")
    for index in range(3):
        _lay_cable(index)
    processes = Processes(JOBS, "onstep.diloco.server.serving.app", "uvicorn", "httpx")
    run = NamespaceRun(processes, directory)
    try:
        print(json.dumps(minority_is_left(run, host="0.0.0.0")))
    finally:
        run.close()
        processes.close()


def _lay_cable(index: int) -> None:
    _ip(f"netns add w{index}")
    _ip(f"link add v{index} type veth peer name eth0 netns w{index}")
    _ip(f"address add 10.77.{index}.1/24 dev v{index}")
    _ip(f"link set v{index} up")
    _ip(f"-netns w{index} address add 10.77.{index}.2/24 dev eth0")
    _ip(f"-netns w{index} link set eth0 up")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
