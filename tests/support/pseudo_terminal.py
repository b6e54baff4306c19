"""Reading what a program has written to a pseudo-terminal: it arrives in pieces, some of them later than the write."""

from __future__ import annotations

import os
import select

from tests.support.waiting import PATIENCE

_SILENCE = 0.2
"""Seconds without a piece after which all has come."""


def read_terminal(near: int, expected: str) -> str:
    """All that was written to the other end, of which `expected` is a part; without it, what came in `PATIENCE`."""
    text = ""
    while select.select([near], [], [], _SILENCE if expected in text else PATIENCE)[0]:
        text += os.read(near, 65536).decode()
    return text
