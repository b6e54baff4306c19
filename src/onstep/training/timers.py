"""Named timers of a run: seconds that its parts take on each rank, printed and handed to the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from onstep.distributed import World
from onstep.training.tags import TENSORBOARD, Point, write_points
from onstep.training.timer import OffTimer, Timer, TimerError

INTERVAL_TIME = "interval-time"
TIMER_LEVELS: dict[str, int] = {
    INTERVAL_TIME: 0,
    "eval-time": 0,
    "evaluate": 0,
    "save-checkpoint": 0,
    "save-checkpoint-non-persistent": 0,
    "load-checkpoint": 0,
    "load-pretrained-checkpoint": 0,
    "tokenizer-setup": 0,
    "model-and-optimizer-setup": 0,
    "train/valid/test-data-iterators-setup": 0,
    "forward-backward": 1,
    "all-grads-sync": 1,
    "params-all-gather": 1,
    "optimizer": 1,
    "batch-generator": 2,
    "forward-compute": 2,
    "backward-compute": 2,
}
"""Level of each timer that Onstep starts; any other is of level 2 unless its first user says otherwise."""

_LAST_LEVEL = 2
_NAME_WIDTH = 48


_OFF = OffTimer()


class Timers:
    """The timers of a run by name. Reading them is collective: all ranks do it with the same names.

    Args:
        log_level: highest level that is measured; -1 measures nothing.
        log_option: what `log` prints of the ranks: max, minmax or all.
        world: the ranks; None is a single one.
        clock: seconds on a clock that never goes back.
    """

    def __init__(
        self,
        log_level: int = 0,
        log_option: str = "minmax",
        *,
        world: World | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if log_option not in ("max", "minmax", "all"):
            raise TimerError(f"logger.timing_log_option must be max, minmax or all, got {log_option!r}.")
        self.log_level, self.log_option = log_level, log_option
        self._world = world or World()
        self._clock = clock
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name, made at its first use; one above the level measures nothing.

        Args:
            log_level: 0, 1 or 2; None is that of `TIMER_LEVELS`, else 2.

        Raises:
            TimerError: for a level that is none of these, or not that of the timer's first use.
        """
        if name not in self._timers:
            level = TIMER_LEVELS.get(name, _LAST_LEVEL) if log_level is None else log_level
            if not 0 <= level <= _LAST_LEVEL:
                raise TimerError(f"the level of timer {name!r} must be 0, 1 or 2, got {level}.")
            self._levels[name] = level
            self._timers[name] = _OFF if level > self.log_level else self._new_timer(name)
        elif log_level is not None and log_level != self._levels[name]:
            raise TimerError(
                f"timer {name!r} is of level {self._levels[name]} since its first use, got {log_level}; "
                "give the same level or none."
            )
        return self._timers[name]

    def names(self, lowest: int = 1, highest: int = _LAST_LEVEL) -> list[str]:
        """Names of Onstep's own timers of these levels that are on, the same on all ranks."""
        return [name for name, level in TIMER_LEVELS.items() if lowest <= level <= min(highest, self.log_level)]

    def gather(self, names: Sequence[str], reset: bool = True, barrier: bool = False) -> dict[str, list[float]]:
        """Seconds of each rank, in rank order, by name. Collective, once; a timer that a rank has not used is 0."""
        return self._gather(names, Timer.elapsed, reset, barrier)

    def log(
        self,
        names: Sequence[str],
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the times in milliseconds, as `log_option` says. Collective.

        Args:
            names: timers; those that measured nothing on any rank are left out.
            rank: who prints; None is the last rank.
            normalizer: what the times are divided by.
            reset: start again from 0.
            barrier: wait for all ranks before the times are taken.
        """
        times = _used(self.gather(names, reset, barrier), normalizer)
        printer = self._world.size - 1 if rank is None else rank
        if times and self._world.rank == printer:
            print(times_block(times, self.log_option), flush=True)  # noqa: T201 - these lines are what was asked for

    def maxima(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> dict[str, float]:
        """Seconds of the slowest rank by tag (`<name>-time`), since this was last asked for. Collective.

        What `log` prints is not touched by it.
        """
        times = _used(self._gather(names, Timer.since_written, reset, barrier), normalizer)
        return {f"{name}-time": max(seconds) for name, seconds in times.items()}

    def write(
        self,
        names: Sequence[str],
        writer: Any,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Hand the slowest rank's seconds to trackers, as `<name>-time`. Collective.

        Args:
            writer: an object with `add_scalar`, several loggers by name (tensorboard, wandb, mlflow, comet), which all
                get the same values, or None where this rank has none.
            iteration: the x-axis.
        """
        points = [Point(tag, value) for tag, value in self.maxima(names, normalizer, reset, barrier).items()]
        if writer is None or not points:
            return
        loggers = writer if isinstance(writer, Mapping) else {TENSORBOARD: writer}
        write_points(loggers, points, iteration, 0)

    def _new_timer(self, name: str) -> Timer:
        device = self._world.device
        synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
        return Timer(name, self._clock, synchronize, self._world.barrier)

    def _gather(
        self, names: Sequence[str], read: Callable[[Timer, bool, bool], float], reset: bool, barrier: bool
    ) -> dict[str, list[float]]:
        if not names:
            return {}
        if barrier:
            self._world.barrier()
        timers = [self._timers.get(name, _OFF) for name in names]
        mine = [read(timer, reset, False) if timer.is_on else 0.0 for timer in timers]
        by_rank = self._world.gather_numbers(mine)
        return {name: [row[index] for row in by_rank] for index, name in enumerate(names)}


def times_block(times: Mapping[str, Sequence[float]], log_option: str) -> str:
    """Megatron Bridge's lines of some timers; `times` are each rank's seconds by name, 0 for a rank without any."""
    lines = [_TITLES[log_option]]
    for name, seconds in times.items():
        padded = f"    {f'{name} '.ljust(_NAME_WIDTH, '.')}: "
        if log_option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {one * 1000:.2f}" for rank, one in enumerate(seconds) if one]
        elif log_option == "max":
            lines.append(f"{padded}{max(seconds) * 1000:.2f}")
        else:
            lines.append(f"{padded}({_least(seconds) * 1000:.2f}, {max(seconds) * 1000:.2f})")
    return "\n".join(lines)


_TITLES = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


def _used(times: Mapping[str, list[float]], normalizer: float) -> dict[str, list[float]]:
    """Those that some rank has measured, divided by the normalizer."""
    return {name: [one / normalizer for one in seconds] for name, seconds in times.items() if any(seconds)}


def _least(seconds: Iterable[float]) -> float:
    """The shortest time of the ranks that measured any."""
    return min(one for one in seconds if one)
