"""Says that a store cannot be reached, at once and then rarely, and when it can be reached again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

AGAIN_SECONDS = 600.0
"""After the first message; each later one comes after twice as long, at most after `_RARELY_SECONDS`."""
_RARELY_SECONDS = 6 * 3600.0


class Outage:
    """The time in which a store cannot be reached, from the first failure until everything that was due is uploaded.

    Args:
        url: of the store.
        due: what has to be uploaded, in words.
    """

    def __init__(self, url: str, due: Callable[[], str]) -> None:
        self._url, self._due = url, due
        self._turn = threading.Lock()
        self._began: float | None = None
        self._next, self._pause = 0.0, AGAIN_SECONDS
        self._is_answering = False

    @property
    def is_on(self) -> bool:
        """Whether there is one."""
        return self._began is not None

    def failed(self, reason: str) -> None:
        """A request has failed, or has not been answered for long.

        Args:
            reason: a sentence.
        """
        with self._turn:
            now = time.monotonic()
            if self._began is None:
                self._began, self._next, self._pause = now, now + AGAIN_SECONDS, AGAIN_SECONDS
                logger.warning("%s The run continues; what is due is uploaded later.", reason)
            elif now >= self._next:
                self._pause = min(2 * self._pause, _RARELY_SECONDS)
                self._next = now + self._pause
                logger.warning(
                    "%s could not be used for %s by now: %s Due: %s.",
                    self._url,
                    _minutes(now - self._began),
                    reason,
                    self._due(),
                )

    def answered(self) -> None:
        """The store has answered; what is due is about to be uploaded."""
        with self._turn:
            if self._began is not None and not self._is_answering:
                self._is_answering = True
                logger.warning(
                    "%s can be reached again after %s; due: %s",
                    self._url,
                    _minutes(time.monotonic() - self._began),
                    self._due(),
                )

    def ended(self) -> None:
        """Everything that was due is uploaded."""
        with self._turn:
            if self._began is not None:
                logger.warning("everything that was due is in %s", self._url)
            self._began, self._is_answering = None, False


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
