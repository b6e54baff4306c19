"""Expresses the quantized states of torchao's optimizers, tensors of classes of its own, as plain ones for checkpoints.

`torch.save` would pickle those classes; a checkpoint of Onstep holds only plain tensors and values.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from onstep.errors import CheckpointError

_MODULES = {"OptimState8bit": "torchao.optim.subclass_8bit", "OptimState4bit": "torchao.optim.subclass_4bit"}
"""The classes, and where they are defined."""
_CLASS, _TENSORS, _ATTRIBUTES = "torchao", "tensors", "attributes"
"""The keys of a quantized tensor in a state."""


def as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state with each quantized tensor as a dictionary of the plain tensors inside it."""
    return _by_tensor(state, _flattened)


def from_plain(state: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `as_plain`.

    Raises:
        CheckpointError: for an unknown kind of quantized tensor.
    """
    return _by_tensor(state, _restored)


def _by_tensor(state: dict[str, Any], convert: Any) -> dict[str, Any]:
    found = {
        param: {name: convert(value) for name, value in values.items()} if isinstance(values, Mapping) else values
        for param, values in state.get("state", {}).items()
    }
    return {**state, "state": found} if found else state


def _flattened(value: Any) -> Any:
    name = type(value).__name__
    if not isinstance(value, Tensor) or _MODULES.get(name) != type(value).__module__:
        return value
    names, attributes = value.__tensor_flatten__()  # type: ignore[attr-defined]  # of traceable subclasses
    return {_CLASS: name, _TENSORS: {inner: getattr(value, inner) for inner in names}, _ATTRIBUTES: list(attributes)}


def _restored(value: Any) -> Any:
    if not isinstance(value, Mapping) or set(value) != {_CLASS, _TENSORS, _ATTRIBUTES}:
        return value
    module = _MODULES.get(value[_CLASS])
    if module is None:
        raise CheckpointError(
            f"the optimizer's state has a quantized tensor of the kind {value[_CLASS]!r}; known are "
            f"{', '.join(_MODULES)}. Resume from another checkpoint, or without the optimizer "
            f"(checkpoint.load_optim=false)."
        )
    return getattr(import_module(module), value[_CLASS]).__tensor_unflatten__(value[_TENSORS], value[_ATTRIBUTES])
