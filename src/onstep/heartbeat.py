"""What this process is doing, in a few attributes that the loop stores to and a watchdog reads from another thread."""

from __future__ import annotations


class Pulse:
    """The signs of life of a process: `beats` is counted up at every bit of progress, the rest says where it stands.

    Storing to it is all that the training pays for being watched; nothing here takes a lock or makes a call.
    """

    __slots__ = ("beats", "doing", "phase", "section", "told")

    def __init__(self) -> None:
        self.beats = 0
        """Bits of progress so far: micro-batches read and computed, callbacks told, parts of a checkpoint written."""
        self.told: tuple[str, str] | None = None
        """The event and the callback that is being told of it right now; None between callbacks."""
        self.phase = "setup"
        """setup | training"""
        self.section: str | None = None
        """Which timed section is open: setup | step | checkpointing."""
        self.doing = "setting up"
        """What the framework itself is at, in words."""


PULSE = Pulse()
"""One for the process, because a process has one main thread to watch and is ended as a whole."""
