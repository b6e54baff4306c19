"""Lines of text on a stream of one's own, which others can follow through a named logger."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

from tqdm import tqdm

from onstep.errors import ConfigError

OutputStream = str | TextIO | None
"""Where lines go: "stdout", "stderr", a text stream, or None for stdout."""


class LineWriter:
    """Writes log records to one stream, and hands them to the handlers that others gave the logger of that name.

    No handler is attached to the logger: it is shared by the process, and a second writer would double every line.
    """

    def __init__(
        self, logger_name: str, line_format: str, stream: OutputStream = None, level: int = logging.INFO
    ) -> None:
        if isinstance(stream, str) and stream not in ("stdout", "stderr"):
            raise ConfigError(f"output_stream must be 'stdout', 'stderr', a text stream or None, got {stream!r}.")
        self._stream = stream
        self._formatter = logging.Formatter(line_format)
        self._level = level
        self._logger = logging.getLogger(logger_name)
        self._logger.propagate = False
        if self._logger.level == logging.NOTSET:
            self._logger.setLevel(logging.DEBUG)

    def write(self, text: str, level: int = logging.INFO) -> None:
        """Write one record, unless its level is below the writer's or the logger's."""
        if level < self._level or not self._logger.isEnabledFor(level):
            return
        record = self._logger.makeRecord(self._logger.name, level, __file__, 0, text, (), None)
        stream = self._resolve()
        tqdm.write(self._formatter.format(record), file=stream)  # above the bars, where there are any
        stream.flush()
        if self._logger.handlers:
            self._logger.handle(record)

    def _resolve(self) -> TextIO:
        """The stream, looked up at every line: a test or a notebook may have replaced `sys.stdout` since."""
        if isinstance(self._stream, str):
            return sys.stderr if self._stream == "stderr" else sys.stdout
        return sys.stdout if self._stream is None else self._stream
