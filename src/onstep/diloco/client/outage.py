"""Says that a server does not answer, at growing intervals that it still does not, and that it answers again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta

logger = logging.getLogger(__name__)

FIRST_REMINDER_SECONDS = 60.0
"""After which it is logged again; then after twice as long, and so on."""


class Outage:
    """Since when a server is away, as is logged; heartbeats and submissions notice it at different times.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None
        self._next_reminder = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the server is away."""
        return self._since is not None

    def begin(self, reason: str = "") -> None:
        """Note that there is no answer; the reason is that of whatever notices it first."""
        now = self._clock()
        if self._since is None:
            self._since, self._next_reminder = now, FIRST_REMINDER_SECONDS
            why = f" ({reason.rstrip('.')})" if reason else ""
            logger.warning(
                "DiLoCo: the server does not answer%s; training continues, and its steps are submitted later", why
            )
        elif now - self._since >= self._next_reminder:
            self._next_reminder = 2 * (now - self._since)
            logger.warning(
                "DiLoCo: the server has not answered for %s; training continues without it",
                timedelta(seconds=round(now - self._since)),
            )

    def end(self, has_submission: bool = True) -> None:
        """Note that the server has decided on this worker's work: it has it, or has dropped it."""
        if self._since is not None:
            self._since = None
            has_it = ", and has this worker's submission" if has_submission else ""
            logger.info("DiLoCo: the server answers again%s", has_it)
