"""Defines the heartbeat of a process: attributes that the loop updates and a watchdog reads from another thread."""

from __future__ import annotations


class Heartbeat:
    """The heartbeat of a process: `beats` counts any progress; the other attributes describe the current activity.

    Updating these attributes is the only cost of being watched: there are no locks and no calls.
    """

    __slots__ = ("activity", "beats", "callback", "phase", "section")

    def __init__(self) -> None:
        self.beats = 0
        """Progress so far: micro-batches read and computed, callbacks called, pieces of a checkpoint written."""
        self.callback: tuple[str, str] | None = None
        """The current event and the callback being called; None between callbacks."""
        self.phase = "setup"
        """setup | training"""
        self.section: str | None = None
        """The open timed section: setup | step | checkpointing."""
        self.activity = "setting up"
        """The current activity of the framework, in words."""


HEARTBEAT = Heartbeat()
"""Process-wide, because a process has one main thread to watch and is terminated as a whole."""
