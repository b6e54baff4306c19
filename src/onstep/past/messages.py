"""Keeps what a repeated run logs: it is about a temporary copy, and not about the run that is looked at."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Kept(logging.Handler):
    """Keeps messages in a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_of_report(record):
            self._messages.append(record.getMessage())


def _is_of_report(record: logging.LogRecord) -> bool:
    """Whether a message is about the states of Onstep's own callbacks, which report and have no effect on the run."""
    names = str(record.args[0]).split(", ") if isinstance(record.args, tuple) and record.args else []
    return "has a state for callback" in str(record.msg) and all(name.startswith("onstep.") for name in names)


@contextmanager
def warnings_kept(messages: list[str]) -> Iterator[None]:
    """Keep what Onstep logs instead of showing it: it is about the temporary copy."""
    log, handler = logging.getLogger("onstep"), _Kept(messages)
    before = log.propagate
    others = log.handlers[:]
    log.handlers[:], log.propagate = [handler], False
    try:
        yield
    finally:
        log.handlers[:], log.propagate = others, before
