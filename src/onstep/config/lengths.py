"""How long a run and its learning-rate schedule are: pure functions of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from onstep.config.batch_sizes import BatchSizes, batch_sizes
from onstep.config.parts import ConfigContainer
from onstep.errors import ConfigError


@dataclass(frozen=True)
class Standing:
    """What the first steps of a run have taken."""

    whole: int = 0
    """Samples of the steps, with a tail counted as a whole step: what the learning-rate schedule moves by."""
    consumed: int = 0
    """Samples that were trained on."""
    epochs: float = 0.0


def standing_after(num_steps: int, sizes: BatchSizes, num_samples: int, drop_last: bool) -> Standing:
    """Where a run stands after `num_steps` steps over a dataset of `num_samples`; none is passed over.

    Args:
        num_steps: steps from the start of the run.
        sizes: the global batches by consumed samples.
        num_samples: samples of an epoch, over all ranks.
        drop_last: a tail shorter than the step that is due is dropped; else it is a step of its own.
    """
    now = Standing()
    while num_steps > 0:
        steps, whole, taken = _epoch(now.consumed, sizes, num_samples, drop_last)
        if num_steps < steps:
            part = sizes.samples_after(num_steps, now.consumed)
            return Standing(now.whole + part, now.consumed + part, now.epochs + part / num_samples)
        alike = _epochs_alike(now.consumed, taken, sizes)
        count = num_steps // steps if alike is None else max(1, min(num_steps // steps, alike))
        now = Standing(now.whole + count * whole, now.consumed + count * taken, now.epochs + count)
        num_steps -= count * steps
    return now


def _epoch(start: int, sizes: BatchSizes, num_samples: int, drop_last: bool) -> tuple[int, int, int]:
    """(steps, their samples as whole steps, samples consumed) of the epoch that begins after `start` samples."""
    steps, taken = sizes.whole_steps(start, num_samples)
    if steps and (drop_last or taken == num_samples):
        return steps, taken, taken
    return steps + 1, taken + sizes.at(start + taken), num_samples


def _epochs_alike(start: int, taken: int, sizes: BatchSizes) -> int | None:
    """How many epochs of `taken` samples fit after `start` before the size changes; None where it never does."""
    later = [at for at in sizes.starts if at > start]
    return (later[0] - start) // taken if later else None


def steps_per_epoch(num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Optimizer steps of one pass over `num_samples` samples, at least one.

    The tail shorter than a global batch is a step of its own unless `drop_last`.
    """
    full, tail = divmod(num_samples, global_batch_size)
    return max(1, full + (tail > 0 and not drop_last))


def steps_of_epochs(num_epochs: float, num_samples: int, global_batch_size: int, drop_last: bool) -> int:
    """Optimizer steps of `num_epochs` epochs; a part of an epoch is rounded up to a step."""
    return math.ceil(num_epochs * steps_per_epoch(num_samples, global_batch_size, drop_last))


def steps_of_growing_epochs(num_epochs: float, num_samples: int, sizes: BatchSizes, drop_last: bool) -> int:
    """`steps_of_epochs` of a run whose batches grow: each epoch has as many steps as fit at its place in the run."""
    steps = consumed = 0
    for left in (num_epochs - epoch for epoch in range(math.ceil(num_epochs))):
        fitting, taken = sizes.whole_steps(consumed, num_samples)
        if not drop_last and taken < num_samples:
            fitting, taken = fitting + 1, num_samples
        fitting = max(1, fitting)
        steps += fitting if left >= 1 else math.ceil(left * fitting)
        consumed += taken
    return steps


def sizes_of(config: ConfigContainer, world_size: int = 1) -> BatchSizes:
    """The global batches of a run by consumed samples. The configuration is a resolved one.

    `world_size` matters where a size is rounded down (`train.decrease_batch_size_if_needed`).
    """
    if config.train.global_batch_size is None:
        raise ConfigError("train.global_batch_size is not set; resolve the configuration first.")
    return batch_sizes(config.train, world_size, config.model.seq_length)


def train_iters(
    config: ConfigContainer, num_samples_per_epoch: int | None = None, *, world_size: int = 1
) -> int | None:
    """Optimizer steps of the run: given, or from `train_samples`, or from `num_epochs` and the length of an epoch.

    None where it takes the length of an epoch and that is not known (or where no length is set). The configuration is a
    resolved one: `global_batch_size` is set.
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
        return steps_of_growing_epochs(train.num_epochs, num_samples_per_epoch, sizes, train.drop_last)
    return steps_of_epochs(train.num_epochs, num_samples_per_epoch, sizes.last, train.drop_last)


def has_growing_tails(config: ConfigContainer, world_size: int = 1) -> bool:
    """Whether batches grow and epochs end in tails, so that the sizes of the steps depend on the length of an epoch."""
    return not config.train.drop_last and sizes_of(config, world_size).varies


def schedule_samples(
    config: ConfigContainer, num_samples_per_epoch: int | None = None, *, world_size: int = 1
) -> Callable[[int], int]:
    """A function that gives the samples by which the learning-rate schedule has moved after so many steps.

    A tail moves it as a whole step does. `num_samples_per_epoch` matters where `has_growing_tails`; None is data
    without a length, or one endless epoch.
    """
    sizes = sizes_of(config, world_size)
    if num_samples_per_epoch is None or not has_growing_tails(config, world_size):
        return sizes.samples_after
    return lambda steps: standing_after(steps, sizes, num_samples_per_epoch, drop_last=False).whole


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
