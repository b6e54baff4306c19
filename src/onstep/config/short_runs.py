"""Fits a recipe's warm-up and intervals to a run that is much shorter than the recipe's own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from onstep.config.container import ConfigContainer
from onstep.config.keys import typed_copy
from onstep.errors import ConfigError

WARMUP = "scheduler.lr_warmup_iters"


@dataclass(frozen=True)
class _Scaled:
    key: str
    is_long: Callable[[int, int], bool]
    """Whether a value is too long for a run of so many steps."""
    fitted: Callable[[int, int, int], int]
    """The value for a run of so many steps, from the recipe's value and length."""


_SCALED = (
    _Scaled(WARMUP, lambda value, steps: 4 * value > steps, lambda value, length, steps: value * steps // length),
    _Scaled("logger.log_interval", lambda value, steps: 10 * value > steps, lambda _, __, steps: max(1, steps // 10)),
    _Scaled("validation.eval_interval", lambda value, steps: value > steps, lambda _, __, steps: max(1, steps // 2)),
)
"""A warm-up keeps its share of the run if it would be over a quarter of it; ten rows and two evaluations are shown."""


def fit_short_run(config: ConfigContainer, recipe: ConfigContainer, given: Collection[str]) -> str | None:
    """Scale, in place, the recipe's warm-up and intervals to a run with fewer steps.

    Args:
        config: the configuration; it is based on the recipe.
        recipe: the recipe's own values.
        given: keys that the user has set, which are never changed.

    Returns:
        What was changed, in a line; None if nothing was.

    Raises:
        ConfigError: if the user's own warm-up is not shorter than the run.
    """
    steps, length = config.train.train_iters, recipe.train.train_iters
    if steps is None:
        return None
    _check_warmup(config, steps, given)
    if length is None or not 0 < steps < length:
        return None
    changed = []
    for one in _SCALED:
        section_name, _, name = one.key.partition(".")
        section = getattr(config, section_name)
        value = getattr(section, name)
        if one.key in given or not value or value != getattr(getattr(recipe, section_name), name):
            continue
        if one.is_long(value, steps):
            setattr(section, name, one.fitted(value, length, steps))
            changed.append(f"{one.key}={getattr(section, name)} (not {value})")
    if not changed:
        return None
    unit = "step" if steps == 1 else "steps"
    return f"scaled to a run of {steps:,} {unit}: {', '.join(changed)}; set them to choose others"


def with_fitting_warmup(config: ConfigContainer, recipe: ConfigContainer | None) -> tuple[ConfigContainer, str | None]:
    """The configuration with the recipe's warm-up scaled if it does not fit into the run, and what was changed."""
    steps, warmup = config.train.train_iters, config.scheduler.lr_warmup_iters
    if recipe is None or steps is None or warmup < steps:
        return config, None
    fitting = typed_copy(config)
    return fitting, fit_short_run(fitting, recipe, {"logger.log_interval", "validation.eval_interval"})


def _check_warmup(config: ConfigContainer, steps: int, given: Collection[str]) -> None:
    warmup = config.scheduler.lr_warmup_iters
    is_scheduled = config.scheduler.lr_decay_iters is None and config.scheduler.max_steps is None
    if WARMUP in given and is_scheduled and warmup >= steps > 0:
        raise ConfigError(
            f"{WARMUP}={warmup} must be less than train.train_iters={steps}, or the learning rate never reaches its "
            f"peak; choose a shorter warm-up, or drop the key for the recipe's share of the run."
        )
