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
FORM = '{"layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.o_proj": "rowwise"}'
COLUMNS, ROWS = "colwise", "rowwise"
SPLIT = (COLUMNS, ROWS)
GATHERED = ("colwise_gather_output", "colwise_rep")
SUMMED = "replicated_with_grad_allreduce"
ROWS_OF_TOKENS = "embedding_rowwise"
EXPERTS = "moe_tp_experts"
HEADS_OF_THREE = "queries_keys_values"
"""A `Conv1D` of transformers with queries, keys and values side by side, whole on each rank."""
STYLES = (*SPLIT, *GATHERED, SUMMED, ROWS_OF_TOKENS, EXPERTS, "replicate")
"""The styles of a plan that are supported."""
_PLANS = {
    "GPT2Model": {
        "wte": ROWS_OF_TOKENS,
        "h.*.attn.c_attn": HEADS_OF_THREE,
        "h.*.attn.c_proj": ROWS,
        "h.*.mlp.c_fc": COLUMNS,
        "h.*.mlp.c_proj": ROWS,
    },
    "GPT2LMHeadModel": {"lm_head": GATHERED[0]},
}
"""Plans of models that bring none, by their class."""
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
        plan = _plan_of(module)
        start = f"{prefix}." if prefix else ""
        for name, _ in module.named_modules():
            style = plan.get(name) or plan.get(_NUMBERS.sub("*", name))
            if style is not None:
                found.setdefault(start + name, str(style))
    if not found:
        raise ConfigError(
            f"{type(model).__name__} has no plan by which {_SIZE} could divide it; give it one, by the names of its "
            f"linear layers, as model._tp_plan = {FORM}, or set the size to 1."
        )
    return found


def _plan_of(module: nn.Module) -> Mapping[str, Any]:
    """The plan that a module brings, or that is known for its class; empty without one."""
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) and plan else _PLANS.get(type(module).__name__, {})


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D` of transformers, whose weight is (inputs, outputs).

    Args:
        module: any module.
    """
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def of_keys(name: str) -> bool:
    """Whether a module projects to keys or values.

    Args:
        name: its name.
    """
    return name.endswith(("k_proj", "v_proj"))


def key_value_heads(model: nn.Module) -> int | None:
    """The number of heads of keys and values; None for a model without a configuration that says it.

    Args:
        model: a model with a plan.
    """
    heads = getattr(_text_config(model), "num_key_value_heads", None)
    return heads if isinstance(heads, int) else None


def _text_config(model: nn.Module) -> Any:
    planned = next(module for module in model.modules() if _plan_of(module))
    config: Any = getattr(planned, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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
        if style not in (*STYLES, HEADS_OF_THREE):
            raise ConfigError(
                f"the plan of {type(model).__name__} divides {name} as {style!r}, which is not supported with "
                f"{_SIZE}={ranks}; use one of {', '.join(STYLES)}, or set the size to 1."
            )
        module = model.get_submodule(name)
        if style == EXPERTS and not _has_known_experts(module, ranks):
            raise ConfigError(
                f"the plan of {type(model).__name__} divides {name} as {style!r}, which requires stacked weights "
                f"gate_up_proj and down_proj without biases, and a width that {_SIZE}={ranks} divides; set the size to "
                f"1."
            )
        if style in SPLIT and not (isinstance(module, nn.Linear) or is_transposed(module)):
            raise ConfigError(
                f"the plan of {type(model).__name__} divides {name} as {style!r}, but that is a "
                f"{type(module).__name__}; only nn.Linear can be divided so."
            )
        size = _size_of(module, style)
        is_shared = of_keys(name) and _is_in_blocks(model, ranks)
        if style in SPLIT and isinstance(size, int) and size % ranks and not is_shared:
            raise ConfigError(f"{name} has the size {size}, which {_SIZE}={ranks} must divide; choose another size.")
    text = _text_config(model)
    for attribute in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, attribute, None)
        if attribute == "num_key_value_heads" and _is_in_blocks(model, ranks):
            continue
        if isinstance(heads, int) and heads % ranks:
            fits = max(size for size in range(1, ranks) if heads % size == 0)
            raise ConfigError(
                f"{attribute}={heads} of {type(model).__name__} must be a multiple of {_SIZE}={ranks}; the nearest "
                f"size that divides it is {fits}."
            )
    for attribute in ("attention_dropout", "attn_pdrop"):
        if value := getattr(text, attribute, 0.0):
            raise ConfigError(
                f"{attribute}={value} of {type(model).__name__} cannot be combined with {_SIZE}={ranks}: the ranks "
                f"would drop the same weights of different heads; set it to 0."
            )


def _size_of(module: Any, style: str) -> int | None:
    """What the ranks divide of a linear layer."""
    if is_transposed(module):
        return int(module.weight.shape[0 if style == ROWS else 1])
    return getattr(module, "in_features" if style == ROWS else "out_features", None)


def _is_in_blocks(model: nn.Module, ranks: int) -> bool:
    """Whether several ranks have the same keys and values, those of one head, in projections of their own."""
    heads = key_value_heads(model)
    if heads is None or heads >= ranks or ranks % heads:
        return False
    keys = [one for one in model.modules() if hasattr(one, "k_proj")]
    return bool(keys) and all(hasattr(one, "num_key_value_groups") and hasattr(one, "v_proj") for one in keys)


def _has_known_experts(module: Any, ranks: int) -> bool:
    known = {name: one for name, one in module._parameters.items() if one is not None}
    if set(known) != {"gate_up_proj", "down_proj"} or getattr(module, "is_transposed", False):
        return False
    both, width = known["gate_up_proj"].shape[1], known["down_proj"].shape[-1]
    return getattr(module, "is_concatenated", True) and both == 2 * width and width % ranks == 0
