"""Reads the plan of a model of transformers, or of a user's module, for tensor-parallel ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from onstep.config.checks.tensor import check_model_sizes
from onstep.errors import ConfigError
from onstep.models.transformer import Transformer

_SIZE = "parallel.tensor_model_parallel_size"
_FORM = '{"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}'
SPLIT = ("colwise", "rowwise")
GATHERED = ("colwise_gather_output", "colwise_rep")
SUMMED = "replicated_with_grad_allreduce"
ROWS_OF_TOKENS = "embedding_rowwise"
STYLES = (*SPLIT, *GATHERED, SUMMED, ROWS_OF_TOKENS, "replicate")
"""The styles of a plan that are supported."""
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.|$)")


def styles_of(model: nn.Module) -> dict[str, str]:
    """The style of each module that the model's own plan names, by its full name.

    Of several models inside each other the outermost plan counts.

    Args:
        model: a model of transformers, or any module with an attribute `_tp_plan`.

    Raises:
        ConfigError: for a model without a plan, or a plan that names no module.
    """
    found: dict[str, str] = {}
    for prefix, module in model.named_modules():
        plan = getattr(module, "_tp_plan", None)
        if not isinstance(plan, Mapping) or not plan:
            continue
        start = f"{prefix}." if prefix else ""
        for name, _ in module.named_modules():
            style = plan.get(name) or plan.get(_NUMBERS.sub("*", name))
            if style is not None:
                found.setdefault(start + name, str(style))
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no plan by which {_SIZE} could divide it; give it one, by the names of its "
            f"linear layers, as model._tp_plan = {_FORM}, or set the size to 1."
        )
    return found


def check_tensors(model: nn.Module, ranks: int) -> None:
    """Refuse a model that tensor-parallel ranks cannot divide: by its plan, or by its sizes if it is a `Transformer`.

    Args:
        model: any module.
        ranks: the number of ranks.

    Raises:
        ConfigError: naming the size, the style, or the form of a plan.
    """
    own = [module for module in model.modules() if isinstance(module, Transformer)]
    if len(own) != 1:
        check_model(model, ranks)
        return
    check_model_sizes(own[0].config, ranks)


def check_model(model: nn.Module, ranks: int) -> None:
    """Refuse a model whose plan cannot be followed by a number of ranks.

    Args:
        model: a model of transformers, or any module with an attribute `_tp_plan`.
        ranks: the number of ranks.

    Raises:
        ConfigError: for a model without a plan, a style that is not supported, or sizes that the ranks do not divide.
    """
    for name, style in styles_of(model).items():
        if style not in STYLES:
            raise ConfigError(
                f"the plan of {type(model).__name__} divides {name} as {style!r}, which is not supported with "
                f"{_SIZE}={ranks}; use one of {', '.join(STYLES)}, or set the size to 1."
            )
        module = model.get_submodule(name)
        size = getattr(module, "in_features" if style == "rowwise" else "out_features", None)
        if style in SPLIT and not isinstance(module, nn.Linear):
            raise ConfigError(
                f"the plan of {type(model).__name__} divides {name} as {style!r}, but that is a "
                f"{type(module).__name__}; only nn.Linear can be divided so."
            )
        if style in SPLIT and isinstance(size, int) and size % ranks:
            raise ConfigError(f"{name} has the size {size}, which {_SIZE}={ranks} must divide; choose another size.")
    planned = next(module for module in model.modules() if getattr(module, "_tp_plan", None))
    config: Any = getattr(planned, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, attribute, None)
        if isinstance(heads, int) and heads % ranks:
            fits = max(size for size in range(1, ranks) if heads % size == 0)
            raise ConfigError(
                f"{attribute}={heads} of {type(model).__name__} must be a multiple of {_SIZE}={ranks}; the nearest "
                f"size that divides it is {fits}."
            )
    if getattr(text, "attention_dropout", 0.0):
        raise ConfigError(
            f"attention_dropout={text.attention_dropout} of {type(model).__name__} cannot be combined with "
            f"{_SIZE}={ranks}: the ranks would drop the same weights of different heads; set it to 0."
        )
