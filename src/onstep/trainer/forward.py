"""Calls a model with a micro-batch, and finds the loss in what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from onstep.errors import ConfigError
from onstep.trainer.labels import MAPPING


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a mapping is handed over as keywords, a tuple or list by position, a tensor as it is."""
    if isinstance(inputs, MAPPING):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (list, tuple)) else model(inputs)


def model_loss(model: nn.Module, inputs: Any, further: dict[str, Any]) -> tuple[Tensor, Any]:
    """The loss that the model itself gives, and its outputs. A mapping of inputs is completed by `further`.

    Raises:
        ConfigError: when it gives none.
    """
    if further and isinstance(inputs, MAPPING):
        inputs = {**inputs, **further}
    outputs = model(**inputs) if type(inputs) is dict else call_model(model, inputs)
    loss = find_loss(outputs)
    if loss is None:
        given = f" It was given {', '.join(inputs)}." if isinstance(inputs, MAPPING) else ""
        raise ConfigError(
            f"{type(model).__name__} returned no loss but {_described(outputs)}.{given} Return a dict with a 0-d "
            f"'loss' or a tuple that starts with it, give the labels that the model needs, or pass "
            f"compute_loss_func(outputs, labels)."
        )
    return loss, outputs


def function_loss(
    compute_loss_func: Callable[..., Any], model: nn.Module, inputs: Any, further: dict[str, Any]
) -> tuple[Tensor, Any]:
    """The loss that a user's function gives for the outputs, the labels and `further` keywords, and the outputs.

    The labels, `labels` of a mapping or the last element of a tuple, are not handed to the model.
    """
    labels = None
    if isinstance(inputs, MAPPING):
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
    elif isinstance(inputs, (list, tuple)) and len(inputs) > 1:
        inputs, labels = inputs[:-1], inputs[-1]
    outputs = call_model(model, inputs)
    return compute_loss_func(outputs, labels, **further), outputs


def find_loss(outputs: Any) -> Tensor | None:
    """The loss in a model's outputs: `loss`, the first element of a tuple, or the output itself; one element."""
    loss: Any = outputs
    if isinstance(outputs, MAPPING):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, (list, tuple)):
        loss = outputs[0] if outputs else None
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        return None
    return loss.reshape(()) if loss.ndim else loss


def _described(outputs: Any) -> str:
    if isinstance(outputs, MAPPING):
        return f"a mapping with {', '.join(outputs) or 'nothing in it'}"
    shape = f" of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else ""
    return f"a {type(outputs).__name__}{shape}"
