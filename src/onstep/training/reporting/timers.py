"""Provides a run's clocks, and its timers by name: seconds per part and rank, printed and written to the trackers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from onstep.distributed import World
from onstep.training.protocols import Loggers
from onstep.training.reporting.bridge_tags import TENSORBOARD, write_tags
from onstep.training.reporting.timer import OFF, Timer, TimerError

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
"""Level of each timer that Onstep starts; any other has level 2 unless its first use specifies one."""

_LAST_LEVEL = 2
_NAME_WIDTH = 48
_TITLES = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


@dataclass(frozen=True)
class Clock:
    """The time sources of the training log."""

    wall: Callable[[], float] = time.time
    """Unix time in seconds."""
    elapsed: Callable[[], float] = time.perf_counter
    """Seconds on a monotonic clock; only differences are meaningful."""


class Timers:
    """The timers of a run by name. Reading them is collective: all ranks must use the same names.

    Args:
        log_level: highest level that is measured; -1 measures nothing.
        log_option: statistic over the ranks that `log` prints: max, minmax or all.
        world: the ranks; None means a single one.
        clock: seconds on a monotonic clock.
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
        device = self._world.device
        self._synchronize = (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else None
        self._timers: dict[str, Timer] = {}
        self._levels: dict[str, int] = {}

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of that name, created on first use; one above the level measures nothing.

        Args:
            log_level: 0, 1 or 2; None means the level in `TIMER_LEVELS`, else 2.

        Raises:
            TimerError: for any other level, or one that differs from the timer's first use.
        """
        if name not in self._timers:
            level = TIMER_LEVELS.get(name, _LAST_LEVEL) if log_level is None else log_level
            if not 0 <= level <= _LAST_LEVEL:
                raise TimerError(f"the level of timer {name!r} must be 0, 1 or 2, got {level}.")
            self._levels[name] = level
            is_on = level <= self.log_level
            self._timers[name] = Timer(name, self._clock, self._synchronize, self._world.barrier) if is_on else OFF
        elif log_level is not None and log_level != self._levels[name]:
            raise TimerError(
                f"timer {name!r} has had level {self._levels[name]} since its first use, got {log_level}; "
                "pass the same level or none."
            )
        return self._timers[name]

    def names(self, lowest: int = 1, highest: int = _LAST_LEVEL) -> list[str]:
        """Names of Onstep's own enabled timers of these levels; the same on all ranks.

        Args:
            lowest: the lowest level.
            highest: the highest level.
        """
        return [name for name, level in TIMER_LEVELS.items() if lowest <= level <= min(highest, self.log_level)]

    def gather(
        self,
        names: Sequence[str],
        reset: bool = True,
        barrier: bool = False,
        read: Callable[[Timer, bool, bool], float] = Timer.elapsed,
    ) -> dict[str, list[float]]:
        """Seconds of each rank, in rank order, by name. One collective; a timer that a rank has not used is 0.

        Args:
            names: the names of the timers.
            reset: whether the timers start again from 0.
            barrier: whether ranks wait for each other first.
            read: gives the seconds of a timer.
        """
        if not names:
            return {}
        if barrier:
            self._world.barrier()
        timers = [self._timers.get(name, OFF) for name in names]
        mine = [read(timer, reset, False) if timer.is_on else 0.0 for timer in timers]
        by_rank = self._world.gather_numbers(mine)
        return {name: [row[index] for row in by_rank] for index, name in enumerate(names)}

    def log(
        self,
        names: Sequence[str],
        rank: int | None = None,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Print the times in milliseconds, as selected by `log_option`. Collective.

        Args:
            names: timers; those that measured nothing on any rank are omitted.
            rank: the rank that prints; None means the last rank.
            normalizer: divisor of the times.
            reset: restart the times from 0.
            barrier: wait for all ranks before reading the times.
        """
        times = _used(self.gather(names, reset, barrier), normalizer)
        printer = self._world.size - 1 if rank is None else rank
        if times and self._world.rank == printer:
            print(times_block(times, self.log_option), flush=True)  # noqa: T201 - these lines are what was asked for

    def maxima(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True, barrier: bool = False
    ) -> dict[str, float]:
        """Seconds of the slowest rank by tag (`<name>-time`), since the last call. Collective.

        The times that `log` prints are not affected.

        Args:
            names: the names of the timers.
            normalizer: times are divided by it, such as the number of steps.
            reset: whether the timers start again from 0.
            barrier: whether ranks wait for each other first.
        """
        times = _used(self.gather(names, reset, barrier, Timer.since_written), normalizer)
        return {f"{name}-time": max(seconds) for name, seconds in times.items()}

    def write(
        self,
        names: Sequence[str],
        writer: object,
        iteration: int,
        normalizer: float = 1.0,
        reset: bool = True,
        barrier: bool = False,
    ) -> None:
        """Write the slowest rank's seconds to trackers, as `<name>-time`. Collective.

        Args:
            writer: an object with `add_scalar`, several loggers by name (tensorboard, wandb, mlflow, comet), which all
                receive the same values, or None on a rank without any.
            iteration: the x-axis.
            names: the names of the timers.
            normalizer: times are divided by it, such as the number of steps.
            reset: whether the timers start again from 0.
            barrier: whether ranks wait for each other first.
        """
        tags = self.maxima(names, normalizer, reset, barrier)
        if writer is None:
            return
        loggers: Loggers = writer if isinstance(writer, Mapping) else {TENSORBOARD: writer}
        write_tags(loggers, tags, iteration, 0)


def times_block(times: Mapping[str, Sequence[float]], log_option: str) -> str:
    """Megatron Bridge's lines for some timers; `times` are each rank's seconds by name, 0 for an unused timer."""
    lines = [_TITLES[log_option]]
    for name, seconds in times.items():
        padded = f"    {f'{name} '.ljust(_NAME_WIDTH, '.')}: "
        if log_option == "all":
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {one * 1000:.2f}" for rank, one in enumerate(seconds) if one]
        elif log_option == "max":
            lines.append(f"{padded}{max(seconds) * 1000:.2f}")
        else:
            least = min(one for one in seconds if one)  # a rank that measured nothing is not the fastest
            lines.append(f"{padded}({least * 1000:.2f}, {max(seconds) * 1000:.2f})")
    return "\n".join(lines)


def _used(times: Mapping[str, list[float]], normalizer: float) -> dict[str, list[float]]:
    """The timers that some rank has used, divided by the normalizer."""
    return {name: [one / normalizer for one in seconds] for name, seconds in times.items() if any(seconds)}
