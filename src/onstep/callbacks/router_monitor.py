"""Monitors the load balance of mixture-of-experts routers, layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from onstep.config.field_types import is_integer_from
from onstep.errors import require
from onstep.events import Callback, CallbackContext
from onstep.events.views import WorldView
from onstep.metrics.moe_losses import RouterLoad, router_load
from onstep.train_state import StateDict

logger: logging.Logger = logging.getLogger(__name__)

_OF_LAYER = ("load_min", "load_max", "load_cv", "dead_experts", "entropy", "dropped")

_SUMMARY = ("load_min", "load_max", "load_cv", "load_cv_max", "dead_experts", "entropy", "dropped", "collapsed_layers")

_OTHERS = ("tokens", "dropped", "entropy")
"""Optional counts of a router besides its loads."""


@runtime_checkable
class CountsRouting(Protocol):
    """The interface of modules that can be monitored.

    A module that measures entropies only on request has an attribute `measures_entropy`, which is set to True.
    """

    def routing_totals(self) -> Mapping[str, Tensor] | None:
        """Totals of this rank's routing in training so far, on the device; None before the first forward pass.

        `load` (experts,) is the number of times each expert was chosen. If known, `tokens`, `dropped` (choices beyond
        the capacity) and `entropy` (sum over tokens of the entropy of the scores, in nats) are 0-d. The numbers only
        increase. Recomputation by activation checkpointing must not be counted: see `onstep.models.is_recomputing`.
        """
        ...


@dataclass(eq=False, repr=False)
class RouterMonitor(Callback):
    """Adds the load of the experts, layer by layer, to `logs`, and warns of collapsed routers.

    It finds every module that has `routing_totals` (`CountsRouting`), such as the routers of Onstep's models. Their
    counts cover all micro-batches and ranks since the last logged step. They stay on the device until the next logged
    step and are then read in one transfer.

    For each layer, under `moe/layer_<index>/` (or the module's name, for a module without `layer_index`):

    - `load_min`, `load_max`: load of the least and the most used expert, as multiples of a balanced load;
    - `load_cv`: standard deviation of the experts' loads divided by their mean;
    - `dead_experts`: number of experts that were never chosen;
    - `entropy`: mean entropy of the tokens' scores, as a fraction of the maximum;
    - `dropped`: fraction of choices that were dropped.

    Over all layers, under `moe/`: the minimum of `load_min`, the maximum of `load_max`, the mean of `load_cv`,
    `load_cv_max`, the sum of `dead_experts`, the minimum of `entropy`, the mean of `dropped`, and `collapsed_layers`.

    The effective number of experts is the exponential of the load's entropy. It ranges from all experts (balanced) to
    the number of experts per token (collapsed); a router counts as collapsed when it has fallen nearly all the way. A
    warning names the router, once until it recovers.

    Args:
        max_keys: maximum number of keys to add. If the layers have more, the worst layers (by `load_cv`) are shown
            instead, as `moe/worst_1/...` and so on, with their `layer`.
        collapse_threshold: fraction of that range that counts as a collapse, above 0 and at most 1.

    Raises:
        ConfigError: if `max_keys` is too small for the keys over all layers, or the threshold is out of range.
    """

    max_keys: int = 64
    collapse_threshold: float = 0.8

    def __post_init__(self) -> None:
        least = len(_SUMMARY)
        rule = f"an integer >= {least}, the number of keys over all layers"
        require(is_integer_from(self.max_keys, least), "max_keys", rule, self.max_keys, "")
        is_share = 0 < self.collapse_threshold <= 1
        require(is_share, "collapse_threshold", "above 0 and at most 1", self.collapse_threshold, "")
        self.collapsed: list[str] = []
        """The layers that had collapsed at the last logged step."""
        self._routers: dict[str, CountsRouting] = {}
        self._indices: dict[str, int] = {}
        self._before: dict[str, Tensor] = {}
        self._carried: dict[str, Tensor] = {}

    def on_train_start(self, context: CallbackContext) -> None:
        """Find the routers."""
        self._routers, self._indices = {}, {}
        for number, (name, module) in enumerate(_counting_modules(context.model)):
            index = getattr(module, "layer_index", None)
            label = name if index is None else f"layer_{index}"
            label = name if label in self._routers else label
            self._routers[label], self._indices[label] = module, number if index is None else index
            if hasattr(module, "measures_entropy"):
                module.measures_entropy = True
        if not self._routers and context.rank == 0:
            logger.warning("RouterMonitor found no module with routing_totals() and reports nothing")
        self._start_interval()

    def on_log_step(self, context: CallbackContext) -> None:
        """Add the statistics since the last logged step. Collective."""
        loads = self._loads(context.state.world)
        if not loads:
            return
        collapsed = [label for label, load in loads.items() if load.collapse >= self.collapse_threshold]
        if context.rank == 0:
            self._warn(loads, collapsed)
        self.collapsed = collapsed
        summary, logs = _summary(list(loads.values()), len(collapsed)), context.logs
        assert logs is not None
        logs.update({f"moe/{name}": value for name, value in summary.items()})
        logs.update(self._by_layer(loads))

    def state_dict(self) -> StateDict:
        """This rank's counts since the last logged step, and the layers that have been warned about."""
        counts = {label: counted.cpu() for label, counted in self._counted().items()}
        return {"counts": counts, "collapsed": list(self.collapsed)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue the interval of a checkpoint.

        Args:
            state_dict: what `state_dict()` returned.
        """
        self._carried = dict(state_dict["counts"])
        self.collapsed = list(state_dict["collapsed"])
        self._start_interval()

    def _start_interval(self) -> None:
        self._before = {label: counts.clone() for label, counts in self._totals().items()}

    def _totals(self) -> dict[str, Tensor]:
        """One vector per router: its loads, followed by the optional counts it has."""
        found = {}
        for label, router in self._routers.items():
            totals = router.routing_totals()
            if totals is not None:
                load = totals["load"].detach().double()
                others = [totals[name].detach().to(load).reshape(()) for name in _OTHERS if name in totals]
                found[label] = torch.cat([load, torch.stack(others)]) if others else load
        return found

    def _counted(self) -> dict[str, Tensor]:
        """This rank's counts since the last logged step."""
        counted = {}
        for label, totals in self._totals().items():
            before, carried = self._before.get(label), self._carried.get(label)
            since = totals if before is None else totals - before
            counted[label] = since if carried is None else since + carried.to(since.device)
        return {**{label: one for label, one in self._carried.items() if label not in counted}, **counted}

    def _loads(self, world: WorldView) -> dict[str, RouterLoad]:
        """The statistics of each router over all ranks. Collective."""
        counted = self._counted()
        self._carried = {}
        self._start_interval()
        if not counted:
            return {}
        sizes = [one.numel() for one in counted.values()]
        numbers = iter(world.data.sum_losses(torch.cat(list(counted.values()))).tolist())
        loads = {}
        for label, size in zip(counted, sizes, strict=True):
            values = [next(numbers) for _ in range(size)]
            names = [name for name in _OTHERS if name in (self._routers[label].routing_totals() or {})]
            others = dict(zip(names, values[size - len(names) :], strict=True))
            if not getattr(self._routers[label], "measures_entropy", True):
                others.pop("entropy", None)
            load = router_load(values[: size - len(names)], **others)
            if load is not None:
                loads[label] = load
        return loads

    def _by_layer(self, loads: Mapping[str, RouterLoad]) -> dict[str, float]:
        rows = {label: {name: getattr(load, name) for name in _OF_LAYER} for label, load in loads.items()}
        rows = {label: {name: one for name, one in row.items() if one is not None} for label, row in rows.items()}
        room = self.max_keys - len(_SUMMARY)
        if sum(map(len, rows.values())) <= room:
            return {f"moe/{label}/{name}": value for label, row in rows.items() for name, value in row.items()}
        worst = sorted(loads, key=lambda label: -loads[label].load_cv)[: room // (len(_OF_LAYER) + 1)]
        shown: dict[str, float] = {}
        for place, label in enumerate(worst, start=1):
            shown[f"moe/worst_{place}/layer"] = self._indices[label]
            shown |= {f"moe/worst_{place}/{name}": value for name, value in rows[label].items()}
        return shown

    def _warn(self, loads: Mapping[str, RouterLoad], collapsed: Sequence[str]) -> None:
        for label in collapsed:
            if label not in self.collapsed:
                load = loads[label]
                logger.warning(
                    "the router of %s has collapsed: its most used expert has %.2f times a balanced load, and %d "
                    "experts are dead; raise moe_aux_loss_coeff, or lower the learning rate of the router",
                    label,
                    load.load_max,
                    load.dead_experts,
                )


def _counting_modules(model: nn.Module | list[nn.Module]) -> list[tuple[str, CountsRouting]]:
    chunks = model if isinstance(model, list) else [model]
    found = [(name, one) for chunk in chunks for name, one in chunk.named_modules() if isinstance(one, CountsRouting)]
    return [(name.removeprefix("module."), one) for name, one in found]


def _summary(loads: Sequence[RouterLoad], num_collapsed: int) -> dict[str, float]:
    cvs = [one.load_cv for one in loads]
    summary: dict[str, float] = {
        "load_min": min(one.load_min for one in loads),
        "load_max": max(one.load_max for one in loads),
        "load_cv": sum(cvs) / len(cvs),
        "load_cv_max": max(cvs),
        "dead_experts": sum(one.dead_experts for one in loads),
    }
    entropies = [one.entropy for one in loads if one.entropy is not None]
    dropped = [one.dropped for one in loads if one.dropped is not None]
    if entropies:
        summary["entropy"] = min(entropies)
    if dropped:
        summary["dropped"] = sum(dropped) / len(dropped)
    return summary | {"collapsed_layers": num_collapsed}
