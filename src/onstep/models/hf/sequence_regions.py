"""Finds where tensor-parallel ranks enter and leave whole sequences in a model that is divided by its own plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from onstep.errors import ConfigError
from onstep.models.hf.tensor_styles import EXPERTS, FORM, ROWS, styles_of

_SEQUENCE = "parallel.sequence_parallel"


@dataclass(frozen=True)
class SequenceRegions:
    """The parts of a model whose ranks divide sequences between the layers' divided modules."""

    layers: tuple[str, ...]
    """The names of the layers, between whose first and last one sequences are divided."""
    regions: frozenset[str]
    """Modules in them that gather whole sequences and compute summands of the result."""
    mixtures: frozenset[str]
    """Modules with experts, whose ranks route whole sequences alike."""

    def are_in_layers(self, name: str) -> bool:
        """Whether a module is in one of the layers.

        Args:
            name: its name.
        """
        return not self.layers_of(name).isdisjoint(self.layers)

    def is_in_mixture(self, name: str) -> bool:
        """Whether a module is in one with experts.

        Args:
            name: its name.
        """
        return not self.layers_of(name).isdisjoint(self.mixtures)

    @staticmethod
    def layers_of(name: str) -> set[str]:
        """The names of the modules that contain one, and its own.

        Args:
            name: its name.
        """
        return set(_upwards(name))


def check_sequences(model: nn.Module) -> None:
    """Refuse a model whose sequences cannot be divided.

    Args:
        model: a model with a plan.

    Raises:
        ConfigError: as for `regions_of`.
    """
    regions_of(model, styles_of(model))


def regions_of(model: nn.Module, styles: Mapping[str, str]) -> SequenceRegions:
    """Where a model's ranks enter and leave whole sequences.

    Args:
        model: a model with a plan.
        styles: the style of each module of its plan.

    Raises:
        ConfigError: unless the divided modules are in layers of one list, of which each has, beside these, norms only.
    """
    mixtures = {_parent(name) for name, style in styles.items() if style == EXPERTS}
    rows = {_parent(name) for name, style in styles.items() if style == ROWS}
    regions = {name for name in rows if mixtures.isdisjoint(_upwards(name))}
    inside = regions | mixtures
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    around = [name for name in lists if inside and all(one.startswith(f"{name}.") for one in inside)]
    if not around:
        raise _refused(model, "no list of layers has all modules that the plan divides by rows")
    layers = {f"{around[-1]}.{own}": layer for own, layer in model.get_submodule(around[-1]).named_children()}
    for name, layer in layers.items():
        for own, child in layer.named_children():
            is_known = f"{name}.{own}" in inside
            if is_known and isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                raise _refused(model, f"{name}.{own} has no forward of whole hidden states")
            if not is_known and any(one.dim() > 1 for one in child.parameters()):
                raise _refused(model, f"{name}.{own} is not a norm, and the plan divides nothing in it by rows")
        found = next((own for own, one in layer.named_modules() if isinstance(one, nn.Dropout) and one.p), None)
        if found is not None:
            raise _refused(model, f"{name}.{found} drops values of its own; set its probability to 0")
        if not any(one.startswith(f"{name}.") for one in inside) or vars(layer)["_parameters"]:
            raise _refused(model, f"{name} has no module that the plan divides by rows, or parameters of its own")
    return SequenceRegions(tuple(layers), frozenset(regions), frozenset(mixtures))


def _refused(model: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"{_SEQUENCE}=true divides sequences between the attention and the feed-forward block of each layer, but of "
        f"{type(model).__name__}, {why}; give it a plan such as {FORM}, or set it to false."
    )


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _upwards(name: str) -> Iterator[str]:
    while name:
        yield name
        name = _parent(name)
