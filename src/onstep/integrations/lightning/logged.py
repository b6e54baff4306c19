"""Keeps what a module logs with `self.log`: the values of a step, and those that are reduced over an epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onstep.data.loaders.iterable_loader import count_samples
from onstep.distributed import World
from onstep.errors import ConfigError, warn_once
from onstep.record.kinds import Metrics
from onstep.train_state import StateDict

logger = logging.getLogger(__name__)

Phase = Literal["training", "validation"]

_OF_A_STEP = frozenset(
    {"training_step", "on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"}
    | {"on_before_backward", "on_after_backward", "on_before_optimizer_step"}
)
"""Hooks whose values belong to a step by default; those of the others belong to an epoch."""
_SILENT = frozenset({"on_fit_start", "on_fit_end", "on_train_end", "on_validation_end", "on_load_checkpoint"})
_REDUCTIONS: dict[object, str] = {torch.mean: "mean", torch.max: "max", torch.min: "min", torch.sum: "sum"}
_REDUCTIONS |= {max: "max", min: "min", sum: "sum"}


@dataclass
class Reduced:
    """A value that is reduced over an epoch: on this rank so far."""

    how: str
    value: Tensor
    weight: Tensor
    shown: bool
    """Whether it is recorded, rather than kept for monitors alone."""

    def add(self, value: Tensor, weight: float) -> None:
        """Add the value of a batch."""
        if self.how == "mean":
            self.value = self.value + value * weight
        elif self.how == "sum":
            self.value = self.value + value
        else:
            self.value = (torch.maximum if self.how == "max" else torch.minimum)(self.value, value)
        self.weight = self.weight + weight

    def result(self, world: World) -> float:
        """The value over all ranks. Collective."""
        own = self.value.to(world.device, copy=True)
        if self.how == "min":
            return -float(world.data.max(-own))
        if self.how == "max":
            return float(world.data.max(own))
        value, weight = world.data.sum(torch.stack([own, self.weight.to(world.device)])).tolist()
        return float(value / weight if self.how == "mean" else value)


class Logged:
    """Receives `self.log` of a module.

    Tensors stay on their device until a step is logged or an epoch ends. Values are the means over ranks.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.metrics: dict[str, Any] = {}
        """The newest value of each name, also under the names with `_step` and `_epoch`."""
        self.of_step: dict[str, Tensor] = {}
        """What the current step has logged."""
        self.of_epoch: dict[Phase, dict[str, Reduced]] = {"training": {}, "validation": {}}
        self._objects: dict[Phase, dict[str, tuple[Any, bool]]] = {"training": {}, "validation": {}}
        """torchmetrics' objects, which reduce themselves."""
        self._also: dict[str, str] = {}
        """Names with `_epoch` that `metrics` has too, by the names of validation values asked for by step and epoch."""
        self.phase: Phase = "training"
        self.hook = ""
        self._batch: object = None
        self._suffix = ""
        self._is_muted = False

    @contextmanager
    def within(self, hook: str) -> Iterator[None]:
        """The context in which a hook is called."""
        before, self.hook = self.hook, hook
        try:
            yield
        finally:
            self.hook = before

    @contextmanager
    def batch(self, batch: object, *, is_filler: bool, suffix: str = "") -> Iterator[None]:
        """The context of a batch; what a filler logs, or adds to torchmetrics' objects, does not count."""
        self._batch, self._suffix, self._is_muted = batch, suffix, is_filler
        states = metric_states(self._module) if is_filler else None
        try:
            yield
        finally:
            self._batch, self._suffix, self._is_muted = None, "", False
            if states is not None:
                load_metric_states(self._module, states)

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        **options: object,
    ) -> None:
        """Log a value. `sync_dist` and the like are accepted: values are always those of all ranks.

        Raises:
            ConfigError: in a hook that belongs to no step or epoch, and for a value that is not one number.
        """
        if self._is_muted or not self.hook:
            return
        if self.hook in _SILENT:
            raise ConfigError(f"self.log({name!r}) in {self.hook} belongs to no step and no epoch; log it elsewhere")
        is_of_step = self.phase == "training" and self.hook in _OF_A_STEP
        on_epoch = not is_of_step if on_epoch is None else on_epoch
        suffix = self._suffix if add_dataloader_idx else ""
        if on_step and on_epoch and not is_of_step:
            self._also[name + suffix] = f"{name}_epoch{suffix}"
        on_step = is_of_step if on_step is None else on_step and is_of_step
        name += suffix
        shown = logger is not False
        forked = on_step and on_epoch
        if callable(getattr(value, "compute", None)) and callable(getattr(value, "reset", None)):
            self._log_object(name, value, on_step, on_epoch, shown)
            return
        number = _number(name, value)
        if on_step:
            self.metrics[name] = number
            if forked:
                self.metrics[f"{name}_step"] = number
            if shown:
                self.of_step[f"{name}_step" if forked else name] = number
        if on_epoch:
            weight = float((count_samples(self._batch) if batch_size is None else batch_size) or 1)
            self._reduce(f"{name}_epoch" if forked else name, number, _reduction(name, reduce_fx), weight, shown)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def step_values(self, world: World) -> Metrics:
        """What the last step has logged, as means over ranks. Collective; reads the device once."""
        if not self.of_step:
            return {}
        own = torch.stack([value.to(world.device) for value in self.of_step.values()])
        values = world.data.sum(own) / world.data.size
        return dict(zip(self.of_step, values.tolist(), strict=True))

    def epoch_values(self, phase: Phase, world: World) -> Metrics:
        """What was logged over an epoch, which the next one begins from scratch. Collective."""
        values = self.update_metrics(phase, world)
        for metric, _ in self._objects[phase].values():
            metric.reset()
        self.of_epoch[phase], self._objects[phase] = {}, {}
        return values

    def update_metrics(self, phase: Phase, world: World) -> Metrics:
        """Let `metrics` have what was logged over an epoch so far, and return what of it is recorded. Collective."""
        found = {name: (one.result(world), one.shown) for name, one in self.of_epoch[phase].items()}
        for name, (metric, shown) in self._objects[phase].items():
            found[name] = float(metric.compute()), shown
        for name, (value, _) in found.items():
            self.metrics[name] = torch.tensor(value)
            if name in self._also:
                self.metrics[self._also[name]] = self.metrics[name]
            elif name.endswith("_epoch"):
                self.metrics[name.removesuffix("_epoch")] = self.metrics[name]
        return {name: value for name, (value, shown) in found.items() if shown}

    def _log_object(self, name: str, metric: Any, on_step: bool, on_epoch: bool, shown: bool) -> None:
        latest = getattr(metric, "_forward_cache", None)  # of torchmetrics: the value of the last call
        if on_step and isinstance(latest, Tensor):
            key = f"{name}_step" if on_epoch else name
            self.metrics[key] = latest.detach()
            if shown:
                self.of_step[key] = latest.detach().double()
        if on_epoch:
            self._objects[self.phase][f"{name}_epoch" if on_step else name] = metric, shown

    def _reduce(self, name: str, value: Tensor, how: str, weight: float, shown: bool) -> None:
        known = self.of_epoch[self.phase].get(name)
        if known is None:
            start = {"max": -math.inf, "min": math.inf}.get(how, 0.0)
            zero = torch.zeros_like(value)
            known = self.of_epoch[self.phase][name] = Reduced(how, zero + start, zero, shown)
        known.add(value, weight)

    def state_dict(self) -> StateDict:
        """What the current epoch has logged on this rank, the newest metrics, and torchmetrics' objects."""
        sums = self.of_epoch["training"]
        names = {id(one): name for name, one in metric_objects(self._module).items()}
        return {
            "sums": {name: [one.how, one.value, one.weight, one.shown] for name, one in sums.items()},
            "metrics": dict(self.metrics),
            "objects": {name: [names[id(one)], s] for name, (one, s) in self._objects["training"].items()},
            "states": metric_states(self._module),
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue with it."""
        device = next((one.device for one in self._module.parameters()), torch.device("cpu"))
        sums, known = state_dict["sums"], metric_objects(self._module)
        self.of_epoch["training"] = {
            name: Reduced(how, value.to(device), weight.to(device), shown)
            for name, (how, value, weight, shown) in sums.items()
        }
        self.metrics = dict(state_dict["metrics"])
        self._objects["training"] = {name: (known[own], shown) for name, (own, shown) in state_dict["objects"].items()}
        load_metric_states(self._module, state_dict["states"])


def add_to_record(logs: Metrics, values: Metrics) -> None:
    """Add values of a module to a record, except under the names of Onstep's own."""
    for name, value in values.items():
        if name in logs:
            warn_once(logger, f"self.log({name!r}) is not recorded, since the record has its own {name!r}; rename it")
        else:
            logs[name] = value


def metric_objects(module: nn.Module) -> dict[str, Any]:
    """torchmetrics' objects in a module, by name."""
    found = module.named_modules()
    return {name: one for name, one in found if hasattr(one, "metric_state") and hasattr(one, "compute")}


def metric_states(module: nn.Module) -> StateDict:
    """What they have accumulated on this rank."""
    return {
        name: {"values": {key: _copied(value) for key, value in one.metric_state.items()}, "updates": one.update_count}
        for name, one in metric_objects(module).items()
    }


def load_metric_states(module: nn.Module, states: StateDict) -> None:
    """Let them continue with it."""
    known = metric_objects(module)
    for name, state in states.items():
        metric: Any = known[name]
        for key, value in state["values"].items():
            moved = [one.to(metric.device) for one in value] if isinstance(value, list) else value.to(metric.device)
            setattr(metric, key, moved)
        metric._update_count, metric._computed = state["updates"], None


def _copied(value: Any) -> Any:
    return [one.detach().clone() for one in value] if isinstance(value, list) else value.detach().clone()


def _number(name: str, value: Any) -> Tensor:
    """A value as a tensor of one float, which stays on its device."""
    tensor = value.detach() if isinstance(value, Tensor) else None
    if tensor is None and isinstance(value, (int, float)):
        tensor = torch.tensor(float(value), dtype=torch.float64)
    if tensor is None or tensor.numel() != 1:
        what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ConfigError(f"self.log({name!r}) was given {what}; log one number, or a metric of torchmetrics")
    tensor = tensor.reshape(())
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _reduction(name: str, given: Callable[..., Any] | str) -> str:
    how = given if isinstance(given, str) else _REDUCTIONS.get(given)
    if how not in ("mean", "max", "min", "sum"):
        raise ConfigError(
            f"self.log({name!r}): reduce_fx must be mean, max, min or sum, got {given!r}; log one of them"
        )
    return how
