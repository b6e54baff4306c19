"""Lets all ranks wait for the uploads of rank 0."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from onstep.hub.uploads import Uploads

_LOOK_SECONDS = 0.5


class Ranks(Protocol):
    """What waiting needs of a world."""

    size: int

    def agree(self, votes: list[int]) -> list[int]:
        """The votes of all ranks, each set if one has set it. Collective."""
        ...


def finish_uploads(uploads: Uploads | None, ranks: Ranks, leaves: Callable[[], bool]) -> None:
    """Wait until the uploads of rank 0 have ended. Collective, by many short ones, so that none exceeds its time limit.

    Args:
        uploads: rank 0's; None on the others.
        ranks: all of them.
        leaves: whether the process was asked to end, which leaves the uploads; so does Ctrl-C in one process.
    """
    if ranks.size == 1:
        if uploads is not None:
            uploads.finish(leaves)
        return
    is_announced = False
    while ranks.agree([int(uploads is not None and not uploads.is_done() and not leaves())])[0]:
        if uploads is not None and not is_announced:
            uploads.announce()
            is_announced = True
        time.sleep(_LOOK_SECONDS)
