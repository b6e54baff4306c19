"""Waiting for something that another thread or process does, however slow the machine is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

PATIENCE = float(os.environ.get("ONSTEP_TEST_PATIENCE", "200"))
"""Seconds to wait for what must happen: no test waits as long unless it fails, and pytest ends it after 300.
The long sweeps may train for longer where the machine does other things too: `make test-slow` allows them more."""
_LOOK_SECONDS = 0.01

Found = TypeVar("Found")


def until(
    find: Callable[[], Found],
    failed: Callable[[], Any] = lambda: "it has not happened",
    *,
    while_true: Callable[[], bool] = lambda: True,
    seconds: float = PATIENCE,
) -> Found:
    """Wait for something true, and return it.

    Args:
        find: what is waited for.
        failed: what the message of the failed test says, as what processes printed.
        while_true: without which it cannot happen any more, as a process that lives.
        seconds: after which the test fails.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_possible, is_late = while_true(), time.monotonic() > deadline
        if found := find():  # asked last: what was done before the end of a process counts
            return found
        assert is_possible, failed()
        assert not is_late, failed()
        time.sleep(_LOOK_SECONDS)
