"""Measures the layers of a held step: norms of gradients, updates and weights, activations and attention logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from onstep.distributed.shard_sums import ShardSums
from onstep.distributed.shards import Split, local_part, split_of, updated_shard
from onstep.events.context import plain_name, unwrap

_LAYERS = ("layers", "layer", "h", "blocks", "block")


@dataclass
class LayerNorms:
    """The norms of one layer; means are over the repeated steps before, None without any."""

    name: str
    weight: float = 0.0
    gradient: float = 0.0
    update: float = 0.0
    mean_gradient: float | None = None
    mean_update: float | None = None
    activation: float | None = None
    """Largest magnitude of its output in this step's forward passes."""
    attention_logit: float | None = None
    """Largest scaled query-key product; None where the layer does not tell."""


def layer_of(parameter: str) -> str:
    """The layer that a parameter belongs to: up to the number of a block, else its module."""
    parts = plain_name(parameter).split(".")
    for at, part in enumerate(parts[:-1]):
        if part.isdigit() and at and parts[at - 1] in _LAYERS:
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or parts[0]


def norms_by_layer(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The L2 norm of each layer's whole tensors, as 0-d device tensors that are not read. Collective for DTensors."""
    groups: dict[tuple[str, Split], list[Tensor]] = {}
    for name, tensor in named:
        groups.setdefault((layer_of(name), split_of(tensor)), []).append(local_part(tensor.detach()))
    norms = [torch.stack(torch._foreach_norm(group)).float().norm() for group in groups.values()]
    sums = ShardSums([split for _, split in groups])
    if sums.has_others:
        norms = list(sums(torch.stack(norms), lambda of_ranks: of_ranks.norm(dim=0)).unbind())
    of_layers: dict[str, list[Tensor]] = {}
    for (name, _), norm in zip(groups, norms, strict=True):
        of_layers.setdefault(name, []).append(norm)
    return {name: of[0] if len(of) == 1 else torch.stack(of).norm() for name, of in of_layers.items()}


def gradients_of(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The gradients that the optimizer gets, by the names of their parameters: DTensors where ranks divide updates.

    Args:
        named: parameters, with their names.
    """
    grads = {name: updated_shard(one).grad for name, one in named}
    return {name: grad for name, grad in grads.items() if grad is not None}


@dataclass
class Means:
    """Means of the layers' norms over the last steps."""

    most: int
    """How many steps, at most."""
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    updates: list[dict[str, Tensor]] = field(default_factory=list)

    @staticmethod
    def mean(of: list[dict[str, Tensor]], layer: str) -> float | None:
        """The mean of a layer; None without a step."""
        found = [float(one[layer]) for one in of if layer in one]
        return sum(found) / len(found) if found else None


class Weights:
    """A copy of the trained weights from before an update, to measure it; needs the memory of one gradient."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module = unwrap(model)
        self._before = {name: one.detach().clone() for name, one in self._model.named_parameters() if one.requires_grad}

    def update_norms(self) -> dict[str, Tensor]:
        """The norms of what was added since; the copy is used up."""
        before, self._before = self._before, {}
        named = dict(self._model.named_parameters())
        return norms_by_layer((name, named[name].detach() - old) for name, old in _used_up(before))


def _used_up(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    while tensors:
        name = next(iter(tensors))
        yield name, tensors.pop(name)


@contextmanager
def largest_activations(model: nn.Module, activations: dict[str, Tensor], logits: dict[str, Tensor]) -> Iterator[None]:
    """While entered, keep the largest magnitude of what each layer returns, and the largest attention logits.

    Args:
        model: its forward passes are observed.
        activations: receives a 0-d tensor by the name of each layer.
        logits: likewise, for layers whose attention measures them.
    """
    modules = dict(unwrap(model).named_modules())
    attentions = {name: one for name, one in modules.items() if hasattr(one, "largest_logit")}
    before = {name: vars(one).get("_watches_logits") for name, one in attentions.items()}

    def keep(found: dict[str, Tensor], name: str, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            largest = tensor.detach().abs().amax().float()
            found[name] = torch.maximum(found[name], largest) if name in found else largest

    def hook_of(name: str) -> Callable[[nn.Module, object, object], None]:
        if name in attentions:
            return lambda module, inputs, output: keep(logits, layer_of(name), _tensors_in(module.largest_logit))
        return lambda module, inputs, output: keep(activations, name, _tensors_in(output))

    layers = {name for name in modules if name and layer_of(f"{name}.weight") == name}
    handles = [modules[name].register_forward_hook(hook_of(name)) for name in {*layers, *attentions}]
    for module in attentions.values():
        vars(module)["_watches_logits"] = True
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, was in before.items():
            vars(attentions[name])["_watches_logits"] = was


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point() and value.numel():
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)
