"""Gives metrics of each repeated step, whether the run logged them or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from onstep.config.suggestions import nearest
from onstep.distributed.shards import updated_shard
from onstep.errors import ConfigError
from onstep.events.context import unwrap
from onstep.optim.zero_counts import count_zeros
from onstep.past.layers import gradients_of, layer_of, norms_by_layer
from onstep.training.compute.step import Step
from onstep.training.stages.job import Job
from onstep.training.stages.record import learning_rate

Metric = Callable[[Job, Step], Tensor | float | int | None]
"""Its value right before the update, or None."""

SWITCHES = {"max_attention_logit": "model.log_max_attention_logit"}
"""Configuration keys that let a step have a metric."""


def _gradients(job: Job) -> list[tuple[str, Tensor]]:
    return list(gradients_of(_weights(job)).items())


def _weights(job: Job) -> list[tuple[str, nn.Parameter]]:
    return list(unwrap(job.model[0]).named_parameters())


def _num_zeros(job: Job) -> Tensor:
    return count_zeros([updated_shard(one) for _, one in _weights(job)], job.run.world.device)


def _whole(norms: Mapping[str, Tensor]) -> Tensor:
    whole: Tensor = torch.stack(list(norms.values())).norm()
    return whole


_OF_STEP: dict[str, Metric] = {
    "loss": lambda job, step: step.total.value(),
    "grad_norm": lambda job, step: step.grad_norm,
    "learning_rate": lambda job, step: learning_rate(job.raw_optimizer),
    "loss_scale": lambda job, step: None if job.scaler is None else job.scaler.scale,
    "params_norm": lambda job, step: _whole(norms_by_layer(_weights(job))),
    "num_zeros": lambda job, step: _num_zeros(job),
    "max_attention_logit": lambda job, step: step.max_attention_logit,
    "num_labels": lambda job, step: step.total.tokens,
    "epoch": lambda job, step: float(job.run.trainer_state.epoch),
}
_OF_LAYER: dict[str, Callable[[Job], list[tuple[str, Tensor]]]] = {
    "gradient": _gradients,
    "weight": lambda job: list(_weights(job)),
}
KNOWN = [*_OF_STEP, *(f"{kind}/LAYER" for kind in _OF_LAYER)]
"""The names of metrics, with a layer's in place of LAYER."""


def metric_named(name: str) -> Metric:
    """The metric of a name: one of a step, or `gradient/LAYER` and `weight/LAYER`, a layer's norm.

    Raises:
        ConfigError: for any other name.
    """
    kind, _, layer = name.partition("/")
    if layer and kind in _OF_LAYER:
        return lambda job, step: _of_layer(_OF_LAYER[kind](job), name, layer)
    if name not in _OF_STEP:
        known = ", ".join(KNOWN)
        raise ConfigError(f"there is no metric {name!r}.{nearest(name, list(_OF_STEP))} Known are {known}.")
    return _OF_STEP[name]


def _of_layer(named: list[tuple[str, Tensor]], name: str, layer: str) -> Tensor:
    chosen = [(key, tensor) for key, tensor in named if layer_of(key) == layer or key == layer]
    if not chosen:
        layers = ", ".join(dict.fromkeys(layer_of(key) for key, _ in named))
        raise ConfigError(f"there is no layer for {name!r}; the model has {layers}.")
    return _whole(norms_by_layer(chosen))


class Log:
    """The values of some metrics at each repeated step."""

    def __init__(self, names: list[str]) -> None:
        self._metrics = {name: metric_named(name) for name in names}
        self.rows: dict[int, dict[str, Any]] = {}
        """By step; a step that a rollback repeats replaces its values."""

    def add(self, job: Job, step: Step) -> None:
        """Read the values of a step, right before its update."""
        with torch.no_grad():
            values = {name: metric(job, step) for name, metric in self._metrics.items()}
        self.rows[step.number] = {name: None if one is None else float(one) for name, one in values.items()}
