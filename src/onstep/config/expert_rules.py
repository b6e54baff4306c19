"""The rules that mixtures of experts and multi-token prediction keep, asked before anything is built."""

from __future__ import annotations

from dataclasses import fields

from onstep.config.model_config import ModelConfig
from onstep.config.part import nearest
from onstep.errors import ConfigError

BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
"""What `moe_router_load_balancing_type` is made of."""


def check_experts(model: ModelConfig) -> None:
    """Check the options of experts against each other, for a run that trains them.

    Raises:
        ConfigError: the first rule that is broken, with the values and what to change.
    """
    check_expert_options(model)
    if (
        model.num_moe_experts is not None
        and model.moe_router_topk == 1
        and model.moe_router_score_function == "softmax"
        and not model.moe_router_pre_softmax
    ):
        raise ConfigError(
            "model.moe_router_topk=1 needs model.moe_router_pre_softmax=true: the softmax over the one chosen expert "
            "is always 1, and the router would get no gradient from the loss."
        )


def check_expert_options(model: ModelConfig) -> None:
    """Check that a model can be built with its options of experts, trained or not.

    Raises:
        ConfigError: the first rule that is broken, with the values and what to change.
    """
    _check_depths(model)
    _check_balancing(model)
    if model.num_moe_experts is None:
        _check_without_experts(model)
        return
    _check_router(model, model.num_moe_experts)
    _check_layers(model)
    _check_shared_expert(model)
    _check_idle(model)


def _check_depths(model: ModelConfig) -> None:
    depths = model.mtp_num_layers
    if depths is not None and depths >= model.seq_length:
        raise ConfigError(
            f"model.mtp_num_layers={depths} must be below model.seq_length={model.seq_length}: depth d predicts the "
            "token d places after the next, which a shorter sequence does not have."
        )
    if not depths and model.mtp_loss_scaling_factor != ModelConfig().mtp_loss_scaling_factor:
        raise ConfigError(
            f"model.mtp_loss_scaling_factor={model.mtp_loss_scaling_factor} weighs multi-token prediction, and there "
            "is none; set model.mtp_num_layers, or leave the factor at its default."
        )


def _check_without_experts(model: ModelConfig) -> None:
    """Options of experts in a model that has none are a mistake, not a wish."""
    defaults = ModelConfig()
    options = [one.name for one in fields(model) if one.name.startswith("moe_")]
    changed = [name for name in options if getattr(model, name) != getattr(defaults, name)]
    if changed:
        found = ", ".join(f"model.{name}={getattr(model, name)}" for name in changed)
        raise ConfigError(
            f"{found} {'is an option' if len(changed) == 1 else 'are options'} of experts, but model.num_moe_experts "
            "is null; set it to the number of experts, or leave the others at their defaults."
        )


def _check_balancing(model: ModelConfig) -> None:
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    for name in names:
        if name not in BALANCING_TYPES:
            raise ConfigError(
                f"model.moe_router_load_balancing_type={kinds!r} must be of {' | '.join(BALANCING_TYPES)}."
                f"{nearest(str(name), list(BALANCING_TYPES))}"
            )
    if not names or len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ConfigError(
            f"model.moe_router_load_balancing_type={kinds!r} must name each type once, and 'none' alone; for no "
            "load-balancing loss write 'none'."
        )
    values = [coefficients] * len(names) if isinstance(coefficients, (int, float)) else list(coefficients)
    if len(values) != len(names):
        raise ConfigError(
            f"model.moe_aux_loss_coeff={coefficients} has {len(values)} entries and "
            f"model.moe_router_load_balancing_type={kinds!r} {len(names)}; give one coefficient for each type, or one "
            "number for all."
        )
    if any(value < 0 for value in values):
        raise ConfigError(f"model.moe_aux_loss_coeff={coefficients} must be >= 0; 0 is no loss.")


def _check_router(model: ModelConfig, experts: int) -> None:
    if model.moe_router_topk > experts:
        raise ConfigError(
            f"model.moe_router_topk={model.moe_router_topk} must be at most model.num_moe_experts={experts}: a token "
            "goes to each expert once; lower it, or add experts."
        )
    factor = model.moe_router_topk_scaling_factor
    if factor is not None and factor <= 0:
        raise ConfigError(f"model.moe_router_topk_scaling_factor={factor} must be > 0; null multiplies nothing.")


def _check_layers(model: ModelConfig) -> None:
    frequency = model.moe_layer_freq
    if isinstance(frequency, int):
        if frequency < 1:
            raise ConfigError(
                f"model.moe_layer_freq={frequency} must be >= 1: every n-th layer from the first has experts."
            )
        return
    if len(frequency) != model.num_layers or any(one not in (0, 1) for one in frequency):
        raise ConfigError(
            f"model.moe_layer_freq={frequency} must have a 0 or 1 for each of the {model.num_layers} layers "
            "(model.num_layers), or be a whole number."
        )
    if not any(frequency):
        raise ConfigError(
            f"model.moe_layer_freq={frequency} leaves no layer with experts, but model.num_moe_experts="
            f"{model.num_moe_experts}; set a layer to 1, or num_moe_experts to null."
        )


def _check_shared_expert(model: ModelConfig) -> None:
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "model.moe_shared_expert_gate=true is the gate of a shared expert, and there is none; set "
            "model.moe_shared_expert_intermediate_size to its width, or the gate to false."
        )


def _check_idle(model: ModelConfig) -> None:
    """An option that does nothing beside the others is a mistake, not a wish."""
    defaults = ModelConfig()
    balancing = model.moe_router_load_balancing_type
    is_balanced = balancing not in ("none", ["none"])
    needs: dict[str, tuple[bool, str]] = {
        "moe_router_pre_softmax": (model.moe_router_score_function == "softmax", "moe_router_score_function=softmax"),
        "moe_router_bias_update_rate": (model.moe_router_enable_expert_bias, "moe_router_enable_expert_bias=true"),
        "moe_token_drop_policy": (model.moe_expert_capacity_factor is not None, "a moe_expert_capacity_factor"),
        "moe_aux_loss_coeff": (is_balanced or not _has_weight(model), "a moe_router_load_balancing_type"),
    }
    for name, (acts, need) in needs.items():
        value = getattr(model, name)
        if value != getattr(defaults, name) and not acts:
            raise ConfigError(
                f"model.{name}={value} does nothing without {need}; set that, or leave {name} at its default."
            )


def _has_weight(model: ModelConfig) -> bool:
    values = model.moe_aux_loss_coeff
    return any(values) if isinstance(values, list) else values != 0
