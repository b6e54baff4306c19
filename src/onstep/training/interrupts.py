"""Notices SIGINT also while the main thread stands in C, where Python cannot raise `KeyboardInterrupt` yet."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress


class Interrupts:
    """A pipe to which Python's own handler in C writes the number of each signal as it comes.

    Only where the signal would raise `KeyboardInterrupt`, and nobody else has such a pipe; else `look` is always False.
    Made and closed in the main thread.
    """

    def __init__(self) -> None:
        self._was_sent = False
        self._ends: tuple[int, int] | None = None
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return
        self._ends = os.pipe()
        for end in self._ends:
            os.set_blocking(end, False)
        others = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            self.close()

    def look(self) -> bool:
        """Whether SIGINT was sent to this process since this was made."""
        if self._ends is not None and not self._was_sent:
            with suppress(BlockingIOError):
                self._was_sent = signal.SIGINT in os.read(self._ends[0], 4096)
        return self._was_sent

    def close(self) -> None:
        """Give the signals' pipe back."""
        ends, self._ends = self._ends, None
        if ends is None:
            return
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, ends[1]):
            signal.set_wakeup_fd(present)
        for end in ends:
            os.close(end)
