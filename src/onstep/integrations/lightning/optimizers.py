"""Reads what `configure_optimizers` returns: one optimizer, and schedulers that are stepped as Lightning does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from onstep.errors import ConfigError
from onstep.train_state import StateDict

_FORMS = (
    "return an optimizer, ([optimizer], [schedulers]), or {'optimizer': ..., 'lr_scheduler': ..., 'monitor': ...}, "
    "where a scheduler may be {'scheduler': ..., 'interval': 'step' | 'epoch', 'frequency': 1, 'monitor': ...}"
)


@dataclass
class Scheduled:
    """A scheduler, and when it is stepped. The fields are the keys of Lightning's dictionary."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    reduce_on_plateau: bool = False
    name: str | None = None


class Schedules:
    """The schedulers of a module as the one that the loop steps after each update.

    Args:
        optimizer: whose learning rates they set.
        configured: the schedulers.
        step: `lr_scheduler_step` of the module, called with a scheduler and the value that it follows, or None.
        batches: the micro-batches of the current epoch so far.
        epochs: the epochs so far, with the one that ends.
        metric: the last value of a metric; None if there is none.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        configured: list[Scheduled],
        step: Callable[[Any, Any], None],
        batches: Callable[[], int],
        epochs: Callable[[], int],
        metric: Callable[[str], Any],
    ) -> None:
        self.optimizer, self.configured = optimizer, configured
        self._step, self._metric = step, metric
        self._count = {"step": batches, "epoch": epochs}

    @property
    def follows(self) -> bool:
        """Whether one of them is stepped by steps, and follows a metric."""
        return any(one.reduce_on_plateau and one.interval == "step" for one in self.configured)

    def get_last_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self) -> None:
        """After an update."""
        self.advance("step", follows=False)

    def advance(self, interval: str, *, follows: bool) -> None:
        """Step those of an interval that are due: those that follow a metric, or the others.

        Raises:
            ConfigError: if the metric that one follows was not logged.
        """
        for one in self.configured:
            is_due = one.interval == interval and one.reduce_on_plateau == follows
            if is_due and self._count[interval]() % one.frequency == 0:
                value = self._metric(one.monitor or "") if follows else None
                if follows and value is None:
                    if not one.strict:
                        continue
                    raise ConfigError(
                        f"{type(one.scheduler).__name__} follows {one.monitor!r}, which was not logged; log it with "
                        f"self.log in validation_step and set eval_strategy, or set strict=False in its dictionary"
                    )
                self._step(one.scheduler, value)

    def state_dict(self) -> StateDict:
        """The states of the schedulers, in order."""
        return {str(i): one.scheduler.state_dict() for i, one in enumerate(self.configured)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Restore them."""
        for i, one in enumerate(self.configured):
            one.scheduler.load_state_dict(state_dict[str(i)])


def read_optimizers(module: Any) -> tuple[torch.optim.Optimizer, list[Scheduled]]:
    """The optimizer and the schedulers of a module.

    Raises:
        ConfigError: for several optimizers, LBFGS, or a value of another form.
    """
    owner = f"{type(module).__name__}.configure_optimizers"
    given = module.configure_optimizers()
    monitor: str | None = None
    optimizers: list[Any]
    if isinstance(given, Mapping):
        optimizers, schedulers = [given.get("optimizer")], [given["lr_scheduler"]] if given.get("lr_scheduler") else []
        monitor = given.get("monitor")
    elif isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[0], (list, tuple)):
        optimizers, others = list(given[0]), given[1]
        schedulers = list(others) if isinstance(others, (list, tuple)) else [others]
    elif isinstance(given, (list, tuple)) and all(isinstance(one, Mapping) for one in given):
        optimizers = [one.get("optimizer") for one in given]
        schedulers = [one["lr_scheduler"] for one in given if one.get("lr_scheduler")]
        monitor = next((one["monitor"] for one in given if "monitor" in one), None)
    else:
        optimizers, schedulers = list(given) if isinstance(given, (list, tuple)) else [given], []
    if len(optimizers) > 1:
        raise ConfigError(
            f"{owner} returned {len(optimizers)} optimizers, which Lightning allows with manual optimization alone; "
            f"return one with a parameter group for each learning rate"
        )
    if not optimizers or not callable(getattr(optimizers[0], "step", None)):
        raise ConfigError(f"{owner} returned {type(given).__name__} without an optimizer; {_FORMS}")
    if isinstance(optimizers[0], torch.optim.LBFGS):
        raise ConfigError(f"{owner} returned LBFGS, which computes the loss several times in a step; return another")
    optimizer: torch.optim.Optimizer = optimizers[0]
    return optimizer, [_scheduled(one, monitor, owner) for one in schedulers]


def _scheduled(given: Any, monitor: str | None, owner: str) -> Scheduled:
    values = dict(given) if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
    unknown = values.keys() - {field.name for field in fields(Scheduled)}
    if unknown or not callable(getattr(values.get("scheduler"), "step", None)):
        what = f"the keys {', '.join(sorted(unknown))}" if unknown else f"{type(given).__name__} without a scheduler"
        raise ConfigError(f"{owner} returned {what} for an lr_scheduler; {_FORMS}")
    if not values.get("monitor"):
        values["monitor"] = monitor
    values.setdefault("reduce_on_plateau", isinstance(values["scheduler"], ReduceLROnPlateau))
    found = Scheduled(**values)
    if found.interval not in ("step", "epoch") or not isinstance(found.frequency, int) or found.frequency < 1:
        raise ConfigError(f"{owner} returned interval={found.interval!r}, frequency={found.frequency!r}; {_FORMS}")
    if found.reduce_on_plateau and found.monitor is None:
        raise ConfigError(f"{owner} returned a {type(found.scheduler).__name__} without a monitor; {_FORMS}")
    return found
