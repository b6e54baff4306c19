"""Keeps a run alive when the reader of its output goes away, as in `onstep train | head`."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class _Pipe(io.FileIO):
    """A file descriptor that leads nowhere once its reader is gone."""

    def write(self, data: Any, /) -> int:
        """Write the bytes, or discard them, and whatever follows, where nobody can read them."""
        try:
            return super().write(data)
        except BrokenPipeError:
            lead_nowhere(self.fileno())
            return len(data)


def lead_nowhere(descriptor: int) -> None:
    """Send a stream of the process to nowhere, so that Python's exit does not fail at it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


@contextmanager
def outliving_readers() -> Iterator[None]:
    """While entered, a closed pipe at standard output or standard error fails nothing; its output is dropped."""
    with ExitStack() as undone:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or stream is not getattr(sys, f"__{name}__"):
                continue  # a test or a notebook has its own
            stream.flush()
            pipe = io.BufferedWriter(_Pipe(stream.fileno(), "w", closefd=False))
            by_line = stream.line_buffering or stream.write_through  # the latter under PYTHONUNBUFFERED
            safe = io.TextIOWrapper(pipe, stream.encoding, stream.errors, line_buffering=by_line)
            setattr(sys, name, safe)
            undone.callback(setattr, sys, name, stream)
            undone.callback(safe.flush)
        yield
