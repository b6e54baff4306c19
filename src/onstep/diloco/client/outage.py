"""Says once that a server does not answer, and once that it answers again."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


class Outage:
    """Whether it is logged that a server is away; heartbeats and submissions notice it at different times."""

    def __init__(self) -> None:
        self._is_told = False

    def begin(self, reason: str = "") -> None:
        """Note that there is no answer; the reason is that of whatever notices it first."""
        if not self._is_told:
            self._is_told = True
            why = f" ({reason.rstrip('.')})" if reason else ""
            logger.warning(
                "DiLoCo: the server does not answer%s; training continues, and its steps are submitted later", why
            )

    def end(self) -> None:
        """Note that the server has this worker's work."""
        if self._is_told:
            self._is_told = False
            logger.info("DiLoCo: the server answers again, and has this worker's submission")
