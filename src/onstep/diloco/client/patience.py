"""Limits the silence of a server: as long as it may hold a request, and a margin that follows its answers so far."""

from __future__ import annotations

LEAST_SECONDS = 5.0
FIRST_SECONDS = 20.0
"""The margin before the first answer."""
SLOWEST_ANSWERS = 4.0
"""The margin is at least this many times the slowest of the last answers."""
BYTES_PER_SECOND = 200e6
"""At which a server checks a submission at least."""
_DECAY = 0.9
"""By which the slowest answer counts less with each later one."""


class Patience:
    """How long one server may be silent; a line that swallows packets is noticed by nothing else.

    Args:
        most: seconds, whatever the answers so far were.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._slowest: float | None = None

    def limit(self, held_seconds: float = 0.0, num_bytes: int = 0) -> float:
        """Seconds without a byte after which a request has failed.

        Args:
            held_seconds: for which the server may hold the answer.
            num_bytes: of the body, which the server checks before it answers.
        """
        margin = FIRST_SECONDS if self._slowest is None else max(LEAST_SECONDS, SLOWEST_ANSWERS * self._slowest)
        return min(self._most, held_seconds + margin + num_bytes / BYTES_PER_SECOND)

    def note(self, seconds: float) -> None:
        """Note how long the server needed to begin an answer, without what it may have held it for."""
        self._slowest = max(0.0, seconds, _DECAY * (self._slowest or 0.0))
