"""One live process for a run: a lock that the system lets go of however the process ends."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from filelock import lock_descriptor

from onstep.errors import RunExistsError
from onstep.forking import release_in_forked_children


class RunLock:
    """Holds `path` until `release` or the process's end. A forked child (a data loader's worker) does not hold it.

    Raises:
        RunExistsError: when a live process holds it.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            is_free = lock_descriptor(self._descriptor, blocking=False)
        except OSError:
            is_free = True  # a file system without locks (some network mounts): nothing tells two processes apart there
        if not is_free:
            holder = os.pread(self._descriptor, 200, 0).decode("utf-8", "replace").strip()
            self.release()
            raise RunExistsError(
                f"{path.parent} is being worked on by a live process ({holder or 'unknown'}); wait for it or end it, "
                f"or choose another run.name."
            )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        release_in_forked_children(self, RunLock.release)

    def release(self) -> None:
        """Let go; doing it twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
