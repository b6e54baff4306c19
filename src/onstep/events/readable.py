"""Losses and norms of a context that read as numbers and act as tensors; the device is read when they are accessed."""

from __future__ import annotations

from typing import Any

EVENTS = ("on_train_step_end", "on_eval_end", "on_test_end")
"""The events at which Megatron Bridge's callbacks use losses and norms as numbers."""


class Reading(float):
    """The number in a tensor with one element: it is formatted, compared and written to JSON like any float.

    Methods and attributes of the tensor (`item`, `detach`, `device`), and torch functions, use the tensor itself.
    """

    tensor: Any

    def __new__(cls, tensor: Any) -> Reading:
        """Read the tensor from its device."""
        self = super().__new__(cls, float(tensor))
        self.tensor = tensor
        return self

    def item(self) -> float:
        """The number."""
        return float(self)

    def __getattr__(self, name: str) -> Any:
        if name == "tensor":
            raise AttributeError(name)
        return getattr(self.tensor, name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_tensors(args), **_tensors(kwargs or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)


class Losses(dict[str, Any]):
    """Losses by name, each read from the device when it is accessed."""

    def __getitem__(self, name: str) -> Any:
        return readable(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """The loss with this name."""
        return readable(super().get(name, default))

    def items(self) -> Any:
        """Names and losses."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """The losses."""
        return [self[name] for name in self]

    def __repr__(self) -> str:
        return repr(dict(self.items()))


def readable(value: Any) -> Any:
    """A tensor with one element as a `Reading`, a dictionary of them as `Losses`; anything else unchanged."""
    if type(value) is dict:
        return Losses(value)
    return Reading(value) if hasattr(value, "is_floating_point") and value.numel() == 1 else value


class ReadableField:
    """A field of a context, None by default, whose value is made readable when it is accessed at one of `EVENTS`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        if holder is None:
            return None
        given = holder.__dict__.get(self._name)
        return readable(given) if holder.__dict__.get("event") in EVENTS else given

    def __set__(self, holder: Any, value: Any) -> None:
        holder.__dict__[self._name] = value


def _tensors(value: Any) -> Any:
    if isinstance(value, Reading):
        return value.tensor
    if isinstance(value, (list, tuple)):
        return type(value)(map(_tensors, value))
    return {key: _tensors(one) for key, one in value.items()} if isinstance(value, dict) else value
