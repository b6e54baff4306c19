"""The gradient norm of a context, which reads as a number and acts as a tensor; the device is read on access."""

from __future__ import annotations

from typing import Any, SupportsFloat

EVENT = "on_train_step_end"
"""The event at which Megatron Bridge's callbacks use the norm as a number; losses are tensors to them."""


class Reading(float):
    """The number in a tensor with one element: it is formatted, compared and written to JSON like any float.

    Methods and attributes of the tensor (`item`, `detach`, `device`), and torch functions, use the tensor itself.
    """

    tensor: SupportsFloat

    def __new__(cls, tensor: SupportsFloat) -> Reading:
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
    def __torch_function__(cls, func: Any, types: object, args: object = (), kwargs: object = None) -> object:
        return func(*_tensors(args), **_tensors(kwargs or {}))

    def __reduce__(self) -> tuple[object, ...]:
        return float, (float(self),)


class ReadableField:
    """A field of a context, None by default; at `EVENT`, a tensor with one element is read when it is accessed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type | None = None) -> Any:
        if holder is None:
            return None
        given = holder.__dict__.get(self._name)
        is_read = holder.__dict__.get("event") == EVENT and hasattr(given, "is_floating_point") and given.numel() == 1
        return Reading(given) if is_read else given

    def __set__(self, holder: object, value: object) -> None:
        holder.__dict__[self._name] = value


def _tensors(value: Any) -> Any:
    if isinstance(value, Reading):
        return value.tensor
    if isinstance(value, (list, tuple)):
        return type(value)(map(_tensors, value))
    return {key: _tensors(one) for key, one in value.items()} if isinstance(value, dict) else value
