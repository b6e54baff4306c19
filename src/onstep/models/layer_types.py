"""Kinds of layers by class name, as conversions of checkpoints see them."""

from __future__ import annotations

from torch import nn

REPLICATED = "replicated"
"""Every rank holds the whole layer, and other libraries' language models have no name for it."""

_KINDS: dict[str, str] = {}


def register_layer_type(class_name: str, kind: str) -> None:
    """Make the kind of a class known; doing so again changes nothing."""
    _KINDS[class_name] = kind


def layer_type(module: nn.Module) -> str | None:
    """The kind of a layer; None where its class is not registered."""
    return _KINDS.get(type(module).__name__)


def replicated_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of `model` that are registered as replicated, by name."""
    return {name: module for name, module in model.named_modules() if layer_type(module) == REPLICATED}
