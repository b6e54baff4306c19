"""Sizes of steps and lengths of runs and schedules, as pure functions of a configuration.

The global batch is a function of the samples consumed before it: constant, ramped up, or in given steps. Nothing else
decides it, so a resumed run, a run on other ranks and a run that skips steps use the same sizes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import pairwise

from onstep.config.container import ConfigContainer
from onstep.config.sections.training import TrainingConfig
from onstep.config.suggestions import shown
from onstep.errors import ConfigError

MAX_INCREMENTS = 100_000
"""Limit for the increments of a ramp-up, and for the epochs of a run with one, which are computed one by one."""
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)(tok)?:(\d+)", re.IGNORECASE)
_EXAMPLE = "'0:32 100K:64 1M:128', or '0:32 50Mtok:64' with a threshold in tokens"


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes, each with the number of consumed samples at which it starts; the first starts at 0."""

    starts: tuple[int, ...]
    """Consumed samples at which each size starts, ascending."""
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
        """Actual samples of a step, for each of `nominal`."""
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
    """The batch sizes of a training configuration; it has a micro-batch size, unless its batch is constant.

    `world_size` counts data-parallel ranks; `seq_length`, the tokens of a sample, is for thresholds in tokens.

    Raises:
        ConfigError: for text that is not a schedule (`onstep.config.checks.batches` has the further rules of a run).
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
        ConfigError: for a ramp that does not end at `global_batch_size`.
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
            f"{global_batch_size} - {start} = {global_batch_size - start} is not a multiple of it; choose "
            f"global_batch_size={near} or {near + increment}, or another increment."
        )
    if count > MAX_INCREMENTS:
        raise ConfigError(f"{key} has {count:,} increments; at most {MAX_INCREMENTS:,} are allowed: use larger ones.")
    starts = tuple(-(-number * samples // count) for number in range(count + 1)) if count else (0,)
    if any(later == earlier for earlier, later in pairwise(starts)):
        raise ConfigError(
            f"{key} has {count} increments within {samples} samples, more than one at a time; use more samples or "
            "larger increments."
        )
    return starts, tuple(start + number * increment for number in range(count + 1))


def parse_steps(text: str, seq_length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(starts, sizes) of a schedule such as '0:32 100K:64 1M:128'; a threshold in tokens is rounded up to a
    sample.

    Raises:
        ConfigError: for anything else, thresholds that do not rise from 0, or sizes that shrink.
    """
    key = f"train.step_batch_size_schedule={shown(text)}"
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
                f"{key} has the threshold {number}{suffix}{unit or ''}, which must be an integer number of "
                f"{'tokens' if unit else 'samples'}; choose {threshold} or {threshold + 1}."
            )
        starts.append(math.ceil(threshold / seq_length) if unit else threshold)
        sizes.append(int(size))
    if starts[0] != 0:
        raise ConfigError(f"{key} must begin with the threshold 0, got {starts[0]} samples; begin with '0:{sizes[0]}'.")
    if any(later <= earlier for earlier, later in pairwise(starts)):
        found = ", ".join(map(str, starts))
        raise ConfigError(f"{key} must have increasing thresholds, got {found} samples; sort them.")
    if min(sizes) <= 0 or any(later < earlier for earlier, later in pairwise(sizes)):
        raise ConfigError(f"{key} must have sizes > 0 that never shrink, got {', '.join(map(str, sizes))}.")
    return tuple(starts), tuple(sizes)


@dataclass(frozen=True)
class ExpectedProgress:
    """The progress of a run after its first steps."""

    whole: int = 0
    """Samples of the steps, with a tail counted as a whole step: the unit of the learning-rate schedule."""
    consumed: int = 0
    """Samples that were trained on."""
    epochs: float = 0.0


def progress_after(num_steps: int, sizes: BatchSizes, num_samples: int, drop_last: bool) -> ExpectedProgress:
    """The progress of a run after `num_steps` steps over a dataset of `num_samples`, without skipped steps.

    Args:
        num_steps: steps from the start of the run.
        sizes: the global batches by consumed samples.
        num_samples: samples of an epoch, over all ranks.
        drop_last: a tail shorter than the step that is due is dropped; else it is a step of its own.
    """
    now = ExpectedProgress()
    while num_steps > 0:
        steps, whole, taken = _epoch(now.consumed, sizes, num_samples, drop_last)
        if num_steps < steps:
            part = sizes.samples_after(num_steps, now.consumed)
            return ExpectedProgress(now.whole + part, now.consumed + part, now.epochs + part / num_samples)
        alike = _epochs_alike(now.consumed, taken, sizes)
        count = num_steps // steps if alike is None else max(1, min(num_steps // steps, alike))
        now = ExpectedProgress(now.whole + count * whole, now.consumed + count * taken, now.epochs + count)
        num_steps -= count * steps
    return now


def _epoch(start: int, sizes: BatchSizes, num_samples: int, drop_last: bool) -> tuple[int, int, int]:
    """(steps, their samples as whole steps, samples consumed) of the epoch that begins after `start` samples."""
    steps, taken = sizes.whole_steps(start, num_samples)
    if steps and (drop_last or taken == num_samples):
        return steps, taken, taken
    return steps + 1, taken + sizes.at(start + taken), num_samples


def _epochs_alike(start: int, taken: int, sizes: BatchSizes) -> int | None:
    """How many epochs of `taken` samples fit after `start` before the size changes; None if it never does."""
    later = [at for at in sizes.starts if at > start]
    return (later[0] - start) // taken if later else None


def steps_per_epoch(num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Optimizer steps of one epoch of `num_samples` samples, at least one.

    The tail shorter than a global batch is a step of its own unless `drop_last`.

    Args:
        global_batch_size: samples of a step, over all ranks.
    """
    full, tail = divmod(num_samples, global_batch_size)
    return max(1, full + (tail > 0 and not drop_last))


def steps_of_epochs(num_epochs: float, num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Optimizer steps of `num_epochs` epochs; a fraction of an epoch is rounded up to a step.

    Args:
        num_samples: samples of an epoch.
        global_batch_size: samples of a step, over all ranks.
        drop_last: whether an incomplete last step is dropped.
    """
    return math.ceil(num_epochs * steps_per_epoch(num_samples, global_batch_size, drop_last))


def steps_of_rampup_epochs(num_epochs: float, num_samples: int, sizes: BatchSizes, drop_last: bool) -> int:
    """`steps_of_epochs` of a run whose batch ramps up: each epoch has as many steps as fit at its place in the run."""
    if num_epochs > MAX_INCREMENTS:
        raise ConfigError(
            f"train.num_epochs={num_epochs} must be at most {MAX_INCREMENTS:,} with a batch that ramps up; set "
            "train.train_iters."
        )
    steps = consumed = 0
    for left in (num_epochs - epoch for epoch in range(math.ceil(num_epochs))):
        fitting, _, taken = _epoch(consumed, sizes, num_samples, drop_last)
        steps += fitting if left >= 1 else math.ceil(left * fitting)
        consumed += taken
    return steps


def sizes_of(config: ConfigContainer, world_size: int = 1) -> BatchSizes:
    """The global batches of a run by consumed samples. The configuration is a resolved one.

    `world_size` matters if a size is rounded down (`train.decrease_batch_size_if_needed`).
    """
    if config.train.global_batch_size is None:
        raise ConfigError("train.global_batch_size is not set; resolve the configuration first.")
    return batch_sizes(config.train, world_size, config.model.seq_length)


def train_iters(
    config: ConfigContainer, num_samples_per_epoch: int | None = None, *, world_size: int = 1
) -> int | None:
    """Optimizer steps of the run: given, or from `train_samples`, or from `num_epochs` and the length of an epoch.

    None if it depends on the length of an epoch and that is not known (or if no length is set). The configuration is a
    resolved one: `global_batch_size` is set.

    Args:
        config: the configuration; its length is in steps, samples or epochs.
        num_samples_per_epoch: samples of the training data; None if unknown.
        world_size: the number of data-parallel ranks.
    """
    train = config.train
    if train.train_iters is not None:
        return train.train_iters
    sizes = sizes_of(config, world_size)
    if train.train_samples is not None:
        return sizes.whole_steps(0, train.train_samples)[0]
    if train.num_epochs is None or num_samples_per_epoch is None:
        return None
    if sizes.varies:
        return steps_of_rampup_epochs(train.num_epochs, num_samples_per_epoch, sizes, train.drop_last)
    return steps_of_epochs(train.num_epochs, num_samples_per_epoch, sizes.last, train.drop_last)


def has_rampup_tails(config: ConfigContainer, world_size: int = 1) -> bool:
    """Whether the batch ramps up and epochs end in tails, so that step sizes depend on the length of an epoch."""
    return not config.train.drop_last and sizes_of(config, world_size).varies


def schedule_samples(
    config: ConfigContainer, num_samples_per_epoch: int | None = None, *, world_size: int = 1
) -> Callable[[int], int]:
    """A function from steps to the samples by which the learning-rate schedule has advanced.

    A tail advances it like a whole step. `num_samples_per_epoch` matters where `has_rampup_tails`; None is data
    without a length, or one endless epoch.
    """
    sizes = sizes_of(config, world_size)
    if num_samples_per_epoch is None or not has_rampup_tails(config, world_size):
        return sizes.samples_after
    return lambda steps: progress_after(steps, sizes, num_samples_per_epoch, drop_last=False).whole


def share_of(steps: int, share: float) -> int:
    """`share` (0 to 1) of `steps`, rounded up as Hugging Face does for warm-up and intervals."""
    return math.ceil(steps * share)


def warmup_and_decay(config: ConfigContainer, iters: int, world_size: int = 1) -> tuple[int, int]:
    """The warm-up as configured and the decay of a run of `iters` steps: in samples if the run is by
    `train_samples`, else in iterations. A share of the decay is rounded up.

    Raises:
        ConfigError: `max_steps` below the length of the run.

    Source: Megatron Bridge's SchedulerConfig.
    """
    scheduler, train = config.scheduler, config.train
    if scheduler.max_steps is not None and scheduler.max_steps < iters:
        raise ConfigError(f"scheduler.max_steps={scheduler.max_steps} must be at least the run's {iters} steps.")
    planned = iters if scheduler.max_steps is None else scheduler.max_steps
    if train.train_samples is None:
        warmup, decay, default = scheduler.lr_warmup_iters, scheduler.lr_decay_iters, planned
    else:
        warmup, decay = scheduler.lr_warmup_samples, scheduler.lr_decay_samples
        default = sizes_of(config, world_size).samples_after(planned)
    decay = default if decay is None else decay
    if scheduler.lr_warmup_fraction is not None:
        warmup = share_of(decay, scheduler.lr_warmup_fraction)
    return warmup, decay
