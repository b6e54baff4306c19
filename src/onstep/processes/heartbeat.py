"""Defines the heartbeat of a process: attributes that the loop updates and a watchdog reads from another thread."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from mmap import mmap

PAGE_BYTES = 512
"""Size of the page that others can read after the process is gone: step, event and callback, activity."""
_STEP, _CALLED, _ACTIVITY = slice(0, 8), slice(8, 264), slice(264, PAGE_BYTES)

ENDING = "ending after"
"""How the last activity begins of a process that a signal ends."""

Called = tuple[str, str]
"""An event, and the callback that handles it."""


class Heartbeat:
    """The heartbeat of a process: `beats` counts any progress; the other attributes describe the current activity.

    Updating these attributes is the only cost of being watched: there are no locks and no calls. With other ranks, they
    are also written to a page of memory that is a file, which outlives even a process that is killed.
    """

    __slots__ = (
        *("_activity", "_observe", "_page", "_step"),
        *("beats", "callback", "is_followed", "phase", "section"),
    )

    def __init__(self) -> None:
        self.beats = 0
        """Progress so far: micro-batches read and computed, callbacks called, pieces of a checkpoint written."""
        self.phase = "setup"
        """setup | training | ended"""
        self.section: str | None = None
        """The open timed section: setup | step | checkpointing."""
        self.callback: Called | None = None
        """The current event and the callback being called; None between callbacks."""
        self.is_followed = False
        """Whether `announce` must be called before `callback` changes."""
        self._observe: Callable[[Called | None], None] | None = None
        self._page: mmap | None = None
        self._activity = "setting up"
        self._step = 0

    def follow(self, observe: Callable[[Called | None], None] | None) -> None:
        """Let a watchdog observe the callbacks of the set-up before they begin and end; None for nobody."""
        self._observe = observe
        self.is_followed = observe is not None or self._page is not None

    def announce(self, called: Called | None) -> None:
        """Tell the watchdog and the other ranks of the next `callback`, where they follow it."""
        if self._observe is not None:
            self._observe(called)
        if self._page is not None:
            self._page[_CALLED] = _called(called)

    @contextmanager
    def calling(self, method: str, author: str) -> Iterator[None]:
        """Context of a call of a callback's method that handles no event; an error gets a note that names both."""
        before, called = self.callback, (method, author)
        self.announce(called)
        self.callback = called
        self.beats += 1
        try:
            yield
        except BaseException as error:
            error.add_note(f"raised by callback '{author}' during '{method}'")
            raise
        finally:
            self.announce(before)
            self.callback = before

    @property
    def activity(self) -> str:
        """The current activity of the framework, in words."""
        return self._activity

    @activity.setter
    def activity(self, activity: str) -> None:
        self._activity = activity
        if self._page is not None:
            self._page[_ACTIVITY] = _line(activity, PAGE_BYTES - 264)

    @property
    def step(self) -> int:
        """Completed optimizer steps, as far as a watchdog has noted."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        if self._page is not None:
            self._page[_STEP] = struct.pack("<q", step)

    def write_to(self, page: mmap | None) -> mmap | None:
        """Keep this page up to date instead of the present one, which is returned; None for none."""
        before, self._page = self._page, page
        self.follow(self._observe)
        self.step, self.activity = self._step, self._activity
        if page is not None:
            page[_CALLED] = _called(self.callback)
        return before


def read_page(page: bytes) -> tuple[int, Called | None, str]:
    """The step, the event and callback, and the activity in a page of `Heartbeat.write_to`."""
    event, _, author = page[_CALLED].rstrip(b"\0").decode(errors="replace").partition("\n")
    activity = page[_ACTIVITY].rstrip(b"\0").decode(errors="replace")
    return struct.unpack("<q", page[_STEP])[0], (event, author) if event else None, activity


def _called(called: Called | None) -> bytes:
    return _line("\n".join(called or ()), 256)


@lru_cache(maxsize=1024)
def _line(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


HEARTBEAT = Heartbeat()
"""Process-wide, because a process has one main thread to watch and is terminated as a whole."""
