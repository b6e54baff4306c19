"""Names temporary directories after their process, so that those of killed processes are recognised and removed."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def owned_name(above: Path, prefix: str) -> str:
    """How names of this process's directories in `above` begin; removes those of processes that are gone.

    Only processes of this machine are known to be gone: `above` may be shared with others.
    """
    ours = f"{prefix}{socket.gethostname()}-"
    for old in above.glob(f"{ours}*"):
        if not _lives(old.name.removeprefix(ours).partition("-")[0]):
            shutil.rmtree(old, ignore_errors=True)
    return f"{ours}{os.getpid()}"


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """A directory for temporary files of this process; what killed processes have left of these is removed."""
    above = Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix=f"{owned_name(above, prefix)}-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _lives(pid: str) -> bool:
    with suppress(ValueError, ProcessLookupError):
        with suppress(PermissionError):  # it lives, and is another user's
            os.kill(int(pid), 0)
        return True
    return False
