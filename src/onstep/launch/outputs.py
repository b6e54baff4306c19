"""Shows what ranks print, each line with its rank in front."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_PAUSE_SECONDS = 0.1
_LONGEST_SHOWN = 200
"""The most characters of a last line that a message quotes."""


@dataclass
class _Followed:
    """A file that a rank writes to."""

    path: Path
    prefix: str
    target: TextIO
    position: int = 0
    rest: bytes = b""
    """The beginning of a line that has not ended."""

    def copy(self, *, is_last: bool) -> None:
        """Show the lines that have been added; of what a progress bar has overwritten, only the last state."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.position)
            added = file.read()
        self.position += len(added)
        *lines, self.rest = (self.rest + added).split(b"\n")
        if is_last and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        for line in lines:
            shown = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", "replace")
            self.target.write(f"{self.prefix}{shown}\n")
        if lines:
            self.target.flush()


class Outputs:
    """Follows the files of the ranks that this node has started, in a thread.

    Args:
        prefix: what precedes each line, with `{}` in place of the rank.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._files: list[_Followed] = []
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, files: Mapping[int, str], target: TextIO) -> None:
        """Show on `target` what is written to the files of ranks; one without a path is written to the terminal."""
        self._files += [
            _Followed(Path(path), self._prefix.format(rank), target) for rank, path in files.items() if path
        ]

    def start(self) -> None:
        """Begin to show lines."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._run, name="onstep-launch-outputs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Show what has been written, and follow these files no longer."""
        if self._thread is None:
            return
        self._ended.set()
        self._thread.join()
        self._thread = None
        self._files.clear()

    def _run(self) -> None:
        while True:
            is_last = self._ended.wait(_PAUSE_SECONDS)
            for one in self._files:
                one.copy(is_last=is_last)
            if is_last:
                return


def last_line(path: str) -> str:
    """The last line of a file that is not empty, shortened; "" without one."""
    if not path or not Path(path).exists():
        return ""
    with Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 65536))
        lines = file.read().decode("utf-8", "replace").replace("\r", "\n").split("\n")
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
