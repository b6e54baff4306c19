"""Sets the time limit of collectives: long until the first step of a training is done, then shorter."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from onstep.config import ConfigContainer

_LEAST_SECONDS = 600.0
"""The shortest limit after the first step that is not asked for."""
_MARGIN_SECONDS = 60.0
"""How much sooner than a collective the watchdog gives up, which names the rank that hangs."""


def seconds_after_first_step(config: ConfigContainer, *, is_own: bool) -> float | None:
    """The limit of a collective once the first step is done, in seconds; None leaves it as it is.

    Args:
        config: the configuration of the run.
        is_own: whether the process group is the run's own, made with `dist.distributed_timeout_minutes`.
    """
    asked, watched = config.dist.timeout_after_first_step, config.ft.watchdog_seconds
    if asked is not None or watched is None or not is_own:
        return asked
    before = 60 * config.dist.distributed_timeout_minutes
    return min(before, max(_LEAST_SECONDS, watched + _MARGIN_SECONDS))


class TimeLimit:
    """The limit of the collectives of a world's groups, while it is another than that with which they were made."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        """The limit that is set; None for that of each group."""
        self._before: list[tuple[ProcessGroup, timedelta]] = []

    def set(self, groups: Iterable[ProcessGroup], seconds: float) -> None:
        """Set the limit of the collectives that groups start from now on; not collective.

        Args:
            groups: groups of gloo or NCCL that have this rank.
            seconds: the limit.
        """
        self.restore()
        self.seconds = seconds
        for group in groups:
            self._before.append((group, _timeout_of(group)))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def restore(self) -> None:
        """Give the groups the limits that they had."""
        for group, timeout in self._before:
            dist.distributed_c10d._set_pg_timeout(timeout, group)
        self.seconds = None
        self._before.clear()


def _timeout_of(group: ProcessGroup) -> timedelta:
    # torch sets this, and has no other way to read it
    options: Any = group._get_backend(group._device_types[0]).options
    timeout: timedelta = options._timeout
    return timeout
