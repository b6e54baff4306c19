"""Lets the other ranks of a run see whether rank 0 is still uploading, by a file that it writes again and again."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from pathlib import Path

LOST_SECONDS = 30.0
"""After which a rank 0 that does not write its file is not waited for."""
_LOOK_SECONDS = 0.2


class Beat:
    """The file, in the directory that all ranks see; nothing of it depends on clocks that agree.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self) -> None:
        """Show that rank 0 lives; called on rank 0."""
        with suppress(OSError):  # a full disk; the other ranks wait a little less
            self._path.write_text(secrets.token_hex(8))

    def end(self) -> None:
        """Show that rank 0 is done; called on rank 0."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def wait_for_end(self) -> None:
        """Wait until rank 0 is done or does not write any more; called on the other ranks."""
        seen, since = self._read(), time.monotonic()
        while seen is not None and time.monotonic() - since < LOST_SECONDS:
            time.sleep(_LOOK_SECONDS)
            now = self._read()
            if now != seen:
                seen, since = now, time.monotonic()

    def _read(self) -> str | None:
        try:
            return self._path.read_text()
        except OSError:
            return None
