"""What waits for a sink between one `open` and its `close`, and the thread that takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from onstep.sinks.deliveries import Deliveries


@dataclass(frozen=True)
class Task:
    """One call of the sink that waits for its turn."""

    call: Callable[[], None]
    is_point: bool = True
    """Whether it may be dropped, and counts as such."""
    number: int = 0
    """How many points were handed over up to here."""


class Session:
    """The thread between one `open` and its `close`, and what waits for it."""

    def __init__(self) -> None:
        self.tasks: SimpleQueue[Task | None] = SimpleQueue()
        self.deliveries = Deliveries()
        self.num_again = 0
        """Points of an earlier process that are given to the sink again."""
        self.thread: threading.Thread | None = None
        """None where the system gave none."""
        self.is_closing = False
        self.is_abandoned = False
        """`close` has waited long enough: points that still wait are not delivered any more."""

    @property
    def is_alive(self) -> bool:
        """Whether anybody takes what is handed over."""
        return self.thread is not None and self.thread.is_alive()

    @property
    def num_left(self) -> int:
        """Points that wait behind `begin_close`'s two last tasks."""
        return max(self.tasks.qsize() - 2, 0)
