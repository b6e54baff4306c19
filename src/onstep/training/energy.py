"""The energy that the GPUs of a run take, without evaluations and saves."""

from __future__ import annotations

import math
from collections.abc import Callable

from onstep.distributed import World
from onstep.training.gpu_gauge import open_gauge


class EnergyMonitor:
    """Adds up the joules of all ranks while it is not paused.

    Args:
        world: the ranks.
        joules: this rank's meter, which only grows; None where it has none.
    """

    def __init__(self, world: World, joules: Callable[[], float] | None = None) -> None:
        self._world, self._joules = world, joules
        self.is_available = False
        self._started: float | None = None
        self._since_lap = 0.0
        self._total = 0.0

    def setup(self) -> bool:
        """Whether every rank can read its meter; without that nothing is measured. Collective."""
        if self._joules is None:
            gauge = open_gauge(self._world.device)
            self._joules = gauge.joules if gauge is not None else None
        can_read = self._joules is not None and not math.isnan(self._joules())
        self.is_available = self._world.agree([int(not can_read)]) == [0]
        return self.is_available

    def resume(self) -> None:
        """Count from here on."""
        if self._started is None:
            self._started = self._read()

    def restart(self) -> None:
        """Forget what came since the last lap, and count from here on."""
        self._since_lap = 0.0
        self._started = self._read()

    def pause(self) -> None:
        """Count nothing until `resume`."""
        if self._started is not None:
            self._since_lap += self._read() - self._started
            self._started = None

    def lap(self) -> float:
        """Joules of all ranks since the last lap; goes on counting. Collective."""
        was_running = self._started is not None
        self.pause()
        joules, self._since_lap = self._since_lap, 0.0
        if was_running:
            self.resume()
        of_all = sum(row[0] for row in self._world.gather_numbers([joules])) if self.is_available else 0.0
        self._total += of_all
        return of_all

    def get_total(self) -> float:
        """Joules of all ranks up to the last lap."""
        return self._total

    def _read(self) -> float:
        return self._joules() if self.is_available and self._joules is not None else 0.0
