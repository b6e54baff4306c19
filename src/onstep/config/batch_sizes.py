"""The global batch of a step as a function of the samples consumed before it: constant, ramped up, or in given steps.

Nothing else decides it, so a resumed run, one of other ranks, and one that skips steps meet the same sizes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import pairwise

from onstep.config.training_config import TrainingConfig
from onstep.errors import ConfigError

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)(tok)?:(\d+)", re.IGNORECASE)
_EXAMPLE = "'0:32 100K:64 1M:128', or '0:32 50Mtok:64' with a threshold in tokens"


@dataclass(frozen=True)
class BatchSizes:
    """Sizes by the number of consumed samples from which each holds; the first holds from 0 on."""

    starts: tuple[int, ...]
    """Consumed samples from which a size holds, ascending."""
    nominal: tuple[int, ...]
    """Configured sizes, over all ranks."""
    unit: int = 1
    """A step's samples are a multiple of this (micro-batch times ranks); a size is rounded down to one."""

    @cached_property
    def varies(self) -> bool:
        """Whether a run may meet more than one size."""
        return len(set(self.nominal)) > 1

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Samples that a step really takes, for each of `nominal`."""
        return tuple(max(1, size // self.unit) * self.unit for size in self.nominal)

    @property
    def last(self) -> int:
        """Samples of a step at the end of the schedule."""
        return self.sizes[-1]

    def nominal_at(self, consumed_samples: int) -> int:
        """The configured size of the step that starts after `consumed_samples`."""
        return self.nominal[bisect_right(self.starts, consumed_samples) - 1]

    def at(self, consumed_samples: int) -> int:
        """The samples of the step that starts after `consumed_samples`."""
        return self.sizes[bisect_right(self.starts, consumed_samples) - 1]

    def samples_after(self, num_steps: int, start: int = 0) -> int:
        """Samples that the next `num_steps` whole steps after `start` samples take."""
        consumed = 0
        for count, size in self._stretches(start, None):
            taken = num_steps if count is None else min(count, num_steps)
            consumed, num_steps = consumed + taken * size, num_steps - taken
            if num_steps <= 0:
                break
        return consumed

    def whole_steps(self, start: int, num_samples: int) -> tuple[int, int]:
        """Steps that fit into the next `num_samples` after `start`, and the samples that they take."""
        steps, taken = 0, 0
        for count, size in self._stretches(start, start + num_samples):
            fitting = (num_samples - taken) // size
            fitting = fitting if count is None else min(count, fitting)
            steps, taken = steps + fitting, taken + fitting * size
            if count is None or fitting < count:
                break
        return steps, taken

    def _stretches(self, start: int, end: int | None) -> Iterator[tuple[int | None, int]]:
        """(steps, size) of each stretch of one size after `start`; the steps of the last are None."""
        consumed = start
        while True:
            index = bisect_right(self.starts, consumed) - 1
            size = self.sizes[index]
            if index + 1 == len(self.starts) or (end is not None and self.starts[index + 1] >= end):
                yield None, size
                return
            count = -(-(self.starts[index + 1] - consumed) // size)
            yield count, size
            consumed += count * size


def batch_sizes(train: TrainingConfig, world_size: int, seq_length: int) -> BatchSizes:
    """The sizes that a training's configuration asks for.

    Args:
        train: with a micro-batch size, unless its global batch is constant.
        world_size: data-parallel ranks.
        seq_length: tokens of a sample, for thresholds in tokens.

    Raises:
        ConfigError: for a schedule that is none (see `onstep.config.batch_rules` for what a run checks besides).
    """
    unit = (train.micro_batch_size or 1) * world_size
    if train.step_batch_size_schedule is not None:
        starts, nominal = parse_steps(train.step_batch_size_schedule, seq_length)
    elif train.rampup_batch_size is not None:
        starts, nominal = ramp(train.rampup_batch_size, train.global_batch_size or unit)
    else:
        starts, nominal = (0,), (train.global_batch_size or unit,)
    return BatchSizes(starts, nominal, unit)


def ramp(rampup: list[int], global_batch_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, sizes) of a linear ramp [start, increment, samples] up to `global_batch_size`.

    The k-th of n increments holds once `k * samples / n` samples are consumed.

    Raises:
        ConfigError: for a ramp that does not come out at `global_batch_size`.
    """
    key = f"train.rampup_batch_size={rampup}"
    if len(rampup) != 3:
        raise ConfigError(f"{key} must be [start, increment, samples], such as [16, 16, 1000].")
    start, increment, samples = rampup
    for name, value in (("start", start), ("increment", increment), ("samples", samples)):
        if value <= 0:
            raise ConfigError(f"{key}: {name} must be > 0, got {value}.")
    if start > global_batch_size:
        raise ConfigError(f"{key} must start at train.global_batch_size={global_batch_size} or below, got {start}.")
    count, rest = divmod(global_batch_size - start, increment)
    if rest:
        near = start + count * increment
        raise ConfigError(
            f"{key} must reach train.global_batch_size={global_batch_size} in whole increments of {increment}: "
            f"{global_batch_size} - {start} = {global_batch_size - start} is no multiple of it; choose "
            f"global_batch_size={near} or {near + increment}, or another increment."
        )
    starts = tuple(-(-number * samples // count) for number in range(count + 1)) if count else (0,)
    if any(later == earlier for earlier, later in pairwise(starts)):
        raise ConfigError(
            f"{key} has {count} increments within {samples} samples, more than one at a time; take more samples or "
            "larger increments."
        )
    return starts, tuple(start + number * increment for number in range(count + 1))


def parse_steps(text: str, seq_length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, sizes) of a schedule such as '0:32 100K:64 1M:128'; a threshold in tokens holds from the sample on with
    which they are reached.

    Raises:
        ConfigError: for anything else, thresholds that do not rise from 0, or sizes that shrink.
    """
    key = f"train.step_batch_size_schedule={text!r}"
    entries = [_ENTRY.fullmatch(word) for word in text.split()]
    if not entries or None in entries:
        raise ConfigError(f"{key} must be thresholds and sizes, {_EXAMPLE}.")
    starts, sizes = [], []
    for entry in entries:
        assert entry is not None
        number, suffix, unit, size = entry.groups()
        exact = Decimal(number) * _SUFFIXES[suffix.upper()]
        threshold = int(exact)
        if threshold != exact:
            raise ConfigError(
                f"{key} has the threshold {number}{suffix}{unit or ''}, which must be a whole number of "
                f"{'tokens' if unit else 'samples'}; choose {threshold} or {threshold + 1}."
            )
        starts.append(math.ceil(threshold / seq_length) if unit else threshold)
        sizes.append(int(size))
    if starts[0] != 0:
        raise ConfigError(f"{key} must begin with the threshold 0, got {starts[0]} samples; begin with '0:{sizes[0]}'.")
    if any(later <= earlier for earlier, later in pairwise(starts)):
        raise ConfigError(f"{key} must have rising thresholds, got {', '.join(map(str, starts))} samples; sort them.")
    if min(sizes) <= 0 or any(later < earlier for earlier, later in pairwise(sizes)):
        raise ConfigError(f"{key} must have sizes > 0 that never shrink, got {', '.join(map(str, sizes))}.")
    return tuple(starts), tuple(sizes)
