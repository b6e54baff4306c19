"""What kind of loss a model, a `compute_loss` or a `compute_loss_func` gives: a mean, or a share of the step's loss."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from typing import Any, Literal

from torch import nn

Convention = Literal["share", "mean"]
NUM_ITEMS = "num_items_in_batch"


def of_model(model: nn.Module) -> Convention:
    """A `transformers` model that takes loss keywords divides by `num_items_in_batch`; any other gives a mean."""
    stated = getattr(model, "accepts_loss_kwargs", None)
    if stated is not None:
        return "share" if stated else "mean"
    parameters = inspect.signature(model.forward).parameters
    if NUM_ITEMS in parameters:
        return "share"
    takes_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "share" if takes_kwargs and hasattr(model, "loss_function") else "mean"


def of_function(function: Callable[..., Any]) -> Convention:
    """A function that reads its `num_items_in_batch` divides by it; one that ignores it gives a mean.

    Many overridden `compute_loss` have the parameter only because the base class has, and return a plain mean.
    """
    function = inspect.unwrap(getattr(function, "__func__", function))
    while hasattr(function, "func"):  # partials
        function = function.func
    if not hasattr(function, "__code__"):
        function = type(function).__call__
    parameters = inspect.signature(function).parameters
    name = NUM_ITEMS if NUM_ITEMS in parameters else _var_keyword(parameters)
    return "share" if name is not None and _reads(function, name) else "mean"


def accepts_num_items(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with `num_items_in_batch`."""
    parameters = inspect.signature(function).parameters
    return NUM_ITEMS in parameters or _var_keyword(parameters) is not None


def is_causal(model: nn.Module) -> bool:
    """Whether the model predicts the next token and shifts its labels itself, as `transformers` models do."""
    loss_type = getattr(model, "loss_type", None)
    return loss_type == "ForCausalLM" or type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _var_keyword(parameters: Any) -> str | None:
    return next((name for name, p in parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)


def _reads(function: Callable[..., Any], name: str) -> bool:
    """Whether a function's own code loads its parameter `name`, also in a nested function."""
    code = getattr(function, "__code__", None)
    if code is None:
        return True
    return any(step.opname.startswith("LOAD") and _mentions(step.argval, name) for step in dis.get_instructions(code))


def _mentions(argument: Any, name: str) -> bool:
    return argument == name or (isinstance(argument, tuple) and name in argument)
