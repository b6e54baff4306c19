"""The rules of a run's length and batch sizes, constant or ramped up."""

from __future__ import annotations

import math
import warnings

from onstep.config.container import ConfigContainer
from onstep.config.lengths import batch_sizes, sizes_of
from onstep.config.suggestions import shown
from onstep.errors import ConfigError

_warned: set[str] = set()
"""Warnings given so far: a run checks its configuration more than once."""


def check_batches(config: ConfigContainer, world_size: int) -> None:
    """Check the length of a run and the sizes of its batches, constant or ramped up."""
    train = config.train
    lengths = {"train_iters": train.train_iters, "train_samples": train.train_samples, "num_epochs": train.num_epochs}
    given = [f"train.{name}={value}" for name, value in lengths.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are both lengths of the run; keep one and set the others to null.")
    if not given and not config.validation.skip_train:
        raise ConfigError("the run has no length: set one of train.train_iters, train.train_samples, train.num_epochs.")
    for step in train.iterations_to_skip:
        if step < 1:
            raise ConfigError(f"train.iterations_to_skip holds {step}; steps are counted from 1, so give 1 or more.")
    if train.rampup_batch_size is not None and train.step_batch_size_schedule is not None:
        raise ConfigError(
            "train.rampup_batch_size and train.step_batch_size_schedule both ramp the batch up; keep one and "
            "set the other to null."
        )
    schedules = {name: getattr(train, name) for name in ("rampup_batch_size", "step_batch_size_schedule")}
    for name, schedule in schedules.items():
        if schedule is not None:
            _check_schedule(config, name, world_size)
            return
    micro, total = train.micro_batch_size, train.global_batch_size
    if micro is None and total is None:
        raise ConfigError(
            "the batch has no size: set train.micro_batch_size (samples of one forward pass on one rank)."
        )
    if micro is None and total is not None:
        check_multiple(f"train.global_batch_size={total}", total, "ranks", (world_size,))
    elif micro is not None and total is not None:
        _check_size(config, total, world_size, f"train.global_batch_size={total}")


def _check_schedule(config: ConfigContainer, name: str, world_size: int) -> None:
    train, key = config.train, f"train.{name}={shown(getattr(config.train, name))}"
    if train.micro_batch_size is None:
        raise ConfigError(f"{key} requires train.micro_batch_size: a batch ramps up by whole micro-batches; set it.")
    is_ramp = name == "rampup_batch_size"
    if is_ramp and train.global_batch_size is None:
        raise ConfigError(f"{key} requires train.global_batch_size, the size it ramps up to; set it.")
    sizes = batch_sizes(train, world_size, config.model.seq_length)
    if train.global_batch_size is not None and sizes.nominal[-1] != train.global_batch_size:
        raise ConfigError(
            f"{key} ends at {sizes.nominal[-1]} and must end at train.global_batch_size={train.global_batch_size}; "
            "make them the same, or leave global_batch_size unset."
        )
    if is_ramp and not sizes.varies:
        raise ConfigError(
            f"{key} starts at train.global_batch_size={train.global_batch_size} and ramps nothing up; start below it, "
            "or set rampup_batch_size to null."
        )
    for size in dict.fromkeys(sizes.nominal):
        _check_size(config, size, world_size, f"{key} has steps of {size} samples; {size}")


def _check_size(config: ConfigContainer, size: int, world_size: int, subject: str) -> None:
    """Check that a batch consists of whole micro-batches, or of at least one if it may be rounded down to them."""
    micro = config.train.micro_batch_size or 1
    if not config.train.decrease_batch_size_if_needed:
        check_multiple(subject, size, "micro_batch_size * ranks", (micro, world_size))
    elif size < micro * world_size:
        raise ConfigError(
            f"a global batch of {size} must have at least micro_batch_size * ranks = {micro} * {world_size} = "
            f"{micro * world_size} samples; with fewer, decrease_batch_size_if_needed would leave nothing."
        )


def check_multiple(subject: str, value: int, factors: str, sizes: tuple[int, ...]) -> None:
    """Check that `value`, which the message calls `subject`, is a multiple of the product of `sizes`.

    Raises:
        ConfigError: with the nearest multiples.
    """
    unit = math.prod(sizes)
    if value % unit == 0:
        return
    product = " * ".join(map(str, sizes)) + (f" = {unit}" if len(sizes) > 1 else "")
    lower, upper = value // unit * unit, (value // unit + 1) * unit
    choices = f"{lower} or {upper}" if lower else str(upper)
    raise ConfigError(f"{subject} must be a multiple of {factors} = {product}; choose {choices}.")


def check_steps(filled: ConfigContainer, iters: int | None, world_size: int) -> None:
    """Check the batches of evaluation, and that a run of `iters` steps has one.

    None is an unknown length. Warns (UserWarning, once) if the run ends before its ramp-up or before a step to skip.
    """
    train, validation = filled.train, filled.validation
    micro, total = validation.eval_micro_batch_size, validation.eval_global_batch_size
    if validation.eval_iters != 0 and micro is not None and total is not None:
        subject = f"validation.eval_global_batch_size={total}"
        check_multiple(subject, total, "eval_micro_batch_size * ranks", (micro, world_size))
    if iters is None:
        return
    sizes = sizes_of(filled, world_size)
    if iters == 0:
        size = f"train.global_batch_size={train.global_batch_size}"
        step = f"the first step of {sizes.at(0)}" if sizes.varies else f"one step of {size}"
        raise ConfigError(
            f"train.train_samples={train.train_samples} is less than {step} samples; train on at least one batch."
        )
    last = sizes.at(sizes.samples_after(iters - 1))
    if train.rampup_batch_size is not None and last < sizes.last:
        _warn_once(
            f"train.rampup_batch_size={train.rampup_batch_size} ramps over {train.rampup_batch_size[2]} samples, and "
            f"the run of {iters} steps has {sizes.samples_after(iters)}: its last step has {last} samples and not "
            f"train.global_batch_size={train.global_batch_size}; train longer, or ramp over fewer samples.",
        )
    beyond = sorted(step for step in set(train.iterations_to_skip) if step > iters)
    if beyond:
        _warn_once(
            f"train.iterations_to_skip has the step {beyond[0]}, but the run has {iters} steps; it is not reached.",
        )


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, UserWarning, stacklevel=2)
