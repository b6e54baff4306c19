"""Finds layers of a model that are alike, so that a few of them stand for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

_POSITIONS = ("idx", "index", "layer_id", "layer_number")
"""How names of attributes end that say which layer it is."""


@dataclass(frozen=True)
class RepeatedLayers:
    """The layers of a decoder, and which of them are alike."""

    path: str
    """The name of their list in the model."""
    layers: nn.ModuleList
    kinds: tuple[int, ...]
    """For each layer the first one that is like it."""

    def example(self, index: int) -> int:
        """The second layer like this one: the first may bring what all of them share, such as a mask."""
        same = [place for place, kind in enumerate(self.kinds) if kind == self.kinds[index]]
        return same[min(1, len(same) - 1)]

    @property
    def last(self) -> int:
        """The least length of a beginning with examples of all layers."""
        return max(map(self.example, range(len(self.layers)))) + 1

    @property
    def lengths(self) -> set[int]:
        """The lengths of the beginnings that tell, by their differences, what each of the other layers adds."""
        examples = {self.example(index) for index in range(self.last, len(self.layers))}
        return {self.last} | {length for index in examples for length in (index, index + 1)}

    def cut(self, model: nn.Module, length: int) -> None:
        """Leave the first layers of a model, which is built like this one."""
        parent, _, name = self.path.rpartition(".")
        setattr(model.get_submodule(parent), name, getattr(model.get_submodule(parent), name)[:length])


def repeated_layers(model: nn.Module) -> RepeatedLayers | None:
    """The layers of the decoder of a model of `transformers`.

    Returns:
        None where tracing beginnings would be as much work as the whole, or the layers are not independent.
    """
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, nn.ModuleList) and len(one) > 2]
    if not found:
        return None
    path, layers = found[0]
    if any(not name.startswith(f"{path}.") for name, _ in found[1:]) or _share_weights(layers):
        return None
    kinds = [_kind(layer) for layer in layers]
    repeated = RepeatedLayers(path, layers, tuple(kinds.index(kind) for kind in kinds))
    return repeated if sum(repeated.lengths) < len(layers) else None


def _share_weights(layers: nn.ModuleList) -> bool:
    owned = [id(param) for layer in layers for param in layer.parameters()]
    return len(owned) != len(set(owned))


def _kind(layer: nn.Module) -> Any:
    """What a layer is but for its values and its position."""
    return [(name, type(module), _settings(module), _weights(module)) for name, module in layer.named_modules()]


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    plain = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))}
    return [(name, value) for name, value in plain.items() if not name.endswith(_POSITIONS)]


def _weights(module: nn.Module) -> list[Any]:
    return [(name, one.shape, one.dtype, one.requires_grad) for name, one in module.named_parameters(recurse=False)]
