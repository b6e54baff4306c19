"""Child processes in milliseconds: a server that has imported everything forks one for each request.

Run as a module it is the server: each line of its input is a JSON list (driver, root, step, edition, number of the
fatal operation, whether it is half done), each line of its output the exit code of the child that saved so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class Children:
    """Starts children that save and die, one after the other."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.support.faults.forking"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def exit_code(self, *request: Any) -> int:
        """Run one child to its end."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=30)


def serve() -> None:
    """Fork a child for each line of the input."""
    import torch

    from onstep.checkpoint.storage.store import FileStore
    from tests.support.faults.fault_saves import DRIVERS, DieAt

    torch.set_num_threads(1)
    for line in sys.stdin:
        driver, root, step, edition, number, is_half_done = json.loads(line)
        child = os.fork()
        if child == 0:
            DRIVERS[driver].save(Path(root), step, edition, FileStore(DieAt(number, is_half_done)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    serve()
