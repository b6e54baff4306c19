"""Writes lines to a stream above any progress bar, and passes them to the handlers of a logger."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from tqdm import tqdm

from onstep.console.style import Style, styled
from onstep.errors import ConfigError

OutputStream = str | TextIO | None
"""Where to write lines: "stdout", "stderr", a text stream, or None for stdout."""


class LineWriter:
    """Writes lines to a stream, and passes them as records to existing handlers of the logger of that name.

    Attaches no handler itself: the logger is shared by the process, and a second writer would duplicate every line.
    """

    def __init__(self, logger_name: str, stream: OutputStream = None) -> None:
        if isinstance(stream, str) and stream not in ("stdout", "stderr"):
            raise ConfigError(f"output_stream must be 'stdout', 'stderr', a text stream or None, got {stream!r}.")
        self._stream = stream
        self._logger = logging.getLogger(logger_name)
        self._logger.propagate = False
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.DEBUG)

    def write(self, text: str, level: int = logging.INFO, *, prefix: str = "", style: Style | None = None) -> None:
        """Write a line unless the logger is silenced for its level; a terminal shows its style.

        Args:
            prefix: precedes the text on the stream, not in the record.
        """
        if not self._logger.isEnabledFor(level):
            return
        stream, line = self._resolve(), prefix + text
        tqdm.write(line if style is None else styled(line, style, stream), file=stream)
        stream.flush()
        if self._logger.handlers:
            self._logger.handle(self._logger.makeRecord(self._logger.name, level, __file__, 0, text, (), None))

    def _resolve(self) -> TextIO:
        """The stream, looked up for every line, since a test or notebook may have replaced `sys.stdout`."""
        if isinstance(self._stream, str):
            return sys.stderr if self._stream == "stderr" else sys.stdout
        return sys.stdout if self._stream is None else self._stream
