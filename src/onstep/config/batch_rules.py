"""Do the sizes of a run's batches go together? Asked before anything is built."""

from __future__ import annotations

from onstep.config.batch_sizes import batch_sizes
from onstep.config.lengths import sizes_of
from onstep.config.loop_rules import warn_once
from onstep.config.parts import ConfigContainer, ValidationConfig
from onstep.errors import ConfigError

_SCHEDULES = ("rampup_batch_size", "step_batch_size_schedule")


def check_batches(config: ConfigContainer, world_size: int) -> None:
    """Check the sizes of training batches, also of those that grow.

    Raises:
        ConfigError: naming value, rule and remedy.
    """
    train = config.train
    schedule = _schedule(config)
    if schedule is None and train.micro_batch_size is None and train.global_batch_size is None:
        raise ConfigError(
            "the batch has no size: set train.micro_batch_size (samples of one forward pass on one rank)."
        )
    if schedule is not None:
        _check_schedule(config, schedule, world_size)
    elif train.global_batch_size is None:
        return
    elif train.micro_batch_size is None:
        check_multiple("train.global_batch_size", train.global_batch_size, "ranks", (world_size,))
    elif train.decrease_batch_size_if_needed:
        _check_at_least_one(train.global_batch_size, train.micro_batch_size, world_size)
    else:
        parts = (train.micro_batch_size, world_size)
        check_multiple("train.global_batch_size", train.global_batch_size, "micro_batch_size * ranks", parts)


def check_evaluation_batch(validation: ValidationConfig, world_size: int) -> None:
    """Check the size of an evaluation batch, where there is one.

    Raises:
        ConfigError: where it is not made of whole micro-batches on all ranks.
    """
    micro, total = validation.eval_micro_batch_size, validation.eval_global_batch_size
    if validation.eval_iters == 0 or micro is None or total is None:
        return
    check_multiple("validation.eval_global_batch_size", total, "eval_micro_batch_size * ranks", (micro, world_size))


def warn_of_short_ramp(config: ConfigContainer, iters: int, world_size: int) -> None:
    """Warn (UserWarning, once) where a run of `iters` steps ends before its ramp comes to `train.global_batch_size`."""
    train = config.train
    if train.rampup_batch_size is None:
        return
    sizes = sizes_of(config, world_size)
    last = sizes.at(sizes.samples_after(iters - 1))
    if last < sizes.last:
        warn_once(
            f"train.rampup_batch_size={train.rampup_batch_size} ramps over {train.rampup_batch_size[2]} samples, and "
            f"the run of {iters} steps takes {sizes.samples_after(iters)}: its last step has {last} samples and not "
            f"train.global_batch_size={train.global_batch_size}; train longer, or ramp over fewer samples.",
        )


def check_multiple(name: str, value: int, factors: str, sizes: tuple[int, ...], subject: str | None = None) -> None:
    """Check that `value` is a multiple of the product of `sizes`.

    `subject` is what the message begins with; None is `name=value`.

    Raises:
        ConfigError: with the nearest values that are.
    """
    unit = 1
    for size in sizes:
        unit *= size
    if value % unit == 0:
        return
    product = " * ".join(map(str, sizes)) + (f" = {unit}" if len(sizes) > 1 else "")
    lower, upper = value // unit * unit, (value // unit + 1) * unit
    choices = f"{lower} or {upper}" if lower else str(upper)
    subject = f"{name}={value}" if subject is None else subject
    raise ConfigError(f"{subject} must be a multiple of {factors} = {product}; choose {choices}.")


def _schedule(config: ConfigContainer) -> str | None:
    """Which schedule of sizes is configured, if any."""
    given = [name for name in _SCHEDULES if getattr(config.train, name) is not None]
    if len(given) > 1:
        raise ConfigError(
            "train.rampup_batch_size and train.step_batch_size_schedule both say how the batch grows; keep one and "
            "set the other to null."
        )
    return given[0] if given else None


def _check_schedule(config: ConfigContainer, name: str, world_size: int) -> None:
    train = config.train
    if train.micro_batch_size is None:
        raise ConfigError(
            f"train.{name}={getattr(train, name)!r} takes train.micro_batch_size: a batch grows by micro-batches; "
            "set it."
        )
    if name == "rampup_batch_size" and train.global_batch_size is None:
        raise ConfigError(
            f"train.rampup_batch_size={train.rampup_batch_size} takes train.global_batch_size, the size that it grows "
            "to; set it."
        )
    sizes = batch_sizes(train, world_size, config.model.seq_length)
    if train.global_batch_size is not None and sizes.nominal[-1] != train.global_batch_size:
        raise ConfigError(
            f"train.{name}={getattr(train, name)!r} ends at {sizes.nominal[-1]} and must end at "
            f"train.global_batch_size={train.global_batch_size}; make them the same, or leave global_batch_size unset."
        )
    if name == "rampup_batch_size" and not sizes.varies:
        raise ConfigError(
            f"train.rampup_batch_size={train.rampup_batch_size} starts at train.global_batch_size="
            f"{train.global_batch_size}, so nothing grows; start below it, or set rampup_batch_size to null."
        )
    for size in dict.fromkeys(sizes.nominal):
        if train.decrease_batch_size_if_needed:
            _check_at_least_one(size, train.micro_batch_size, world_size)
        else:
            parts = (train.micro_batch_size, world_size)
            subject = f"train.{name}={getattr(train, name)!r} has steps of {size} samples; {size}"
            check_multiple("", size, "micro_batch_size * ranks", parts, subject)


def _check_at_least_one(size: int, micro_batch_size: int, world_size: int) -> None:
    """A batch can be rounded down to whole micro-batches only where it has one."""
    unit = micro_batch_size * world_size
    if size < unit:
        raise ConfigError(
            f"a global batch of {size} must have at least micro_batch_size * ranks = {micro_batch_size} * {world_size} "
            f"= {unit} samples; with fewer, decrease_batch_size_if_needed would leave nothing of it."
        )
