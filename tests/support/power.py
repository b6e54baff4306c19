"""No test cuts the power, so nothing has to wait for the disk: what is written is in the system's memory at once."""

from __future__ import annotations

import os
import stat
from unittest import mock


def never_cut() -> None:
    """Let `os.fsync` of this process accept files and directories without waiting; of all others it knows itself."""
    fsync = os.fsync

    def looks(descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            fsync(descriptor)

    mock.patch.object(os, "fsync", looks).start()
