"""Shows the messages of `logging` and of `warnings` on the console of a command, one line each, above any bar."""

from __future__ import annotations

import logging
import sys
import warnings
from typing import TextIO

from tqdm import tqdm

from onstep.console.style import Style, in_words, styled

_LEVELS = {"quiet": logging.WARNING, "verbose": logging.DEBUG}


def show_messages(level: str, *, is_main: bool) -> None:
    """Write messages to standard error; for the process of a command, whose handlers of `logging` are ours.

    Args:
        level: "quiet" shows warnings and errors, "verbose" also what Onstep logs for debugging.
        is_main: other ranks than the first show warnings of Onstep, but not Python's, which the first shows as well.
    """
    handler = _Console()
    logging.basicConfig(level=logging.INFO if is_main else logging.WARNING, format="%(message)s", handlers=[handler])
    logging.getLogger("onstep").setLevel(_LEVELS.get(level, logging.INFO) if is_main else logging.WARNING)
    if level == "quiet":
        logging.getLogger().setLevel(logging.WARNING)
    for client in ("httpx", "httpx2") if level != "verbose" else ():  # they log each request to the Hub at INFO
        logging.getLogger(client).setLevel(logging.WARNING)
    warnings.formatwarning = _first_line
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").setLevel(logging.WARNING if is_main else logging.ERROR)


def _first_line(message: Warning | str, *further: object, **named: object) -> str:
    """A warning's text without the line of code that it came from, as a line, since `warnings` itself adds no end."""
    return f"{message}\n"


class _Console(logging.Handler):
    """Writes each record above the bars, on the current standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        stream: TextIO = sys.stderr
        text, style = self.format(record).rstrip(), _style_of(record.levelno)
        if style is not None:
            text = f"{style}: {text}"
        if record.exc_info is None:  # the lines of a traceback are code
            text = in_words(text, stream)
        if style is not None:
            text = styled(text, style, stream)
        tqdm.write(text, file=stream)


def _style_of(level: int) -> Style | None:
    if level >= logging.ERROR:
        return "error"
    return "warning" if level >= logging.WARNING else None
