"""The rules of a model's sizes and options together: attention, experts, multi-token prediction and LoRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from onstep.config.container import ConfigContainer
from onstep.config.field_types import is_number
from onstep.config.keys import KEYS
from onstep.config.sections.model import ModelConfig
from onstep.config.suggestions import nearest, shown
from onstep.errors import ConfigError

_STRETCHES = ("factor", "original_max_position_embeddings")
_ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (_STRETCHES, ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")),
    "llama3": ((*_STRETCHES, "low_freq_factor", "high_freq_factor"), ()),
}
"""The required and the optional numbers of each `rope_type`."""

BALANCING_TYPES = KEYS["model.moe_router_load_balancing_type"].option.elements
"""The types of load-balancing losses."""

LORA_PROJECTIONS: Mapping[str, str] = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}
"""The matrices of a layer that LoRA adapts, by their names here and in `transformers`."""


def check_trained_model(config: ConfigContainer) -> None:
    """Check a model to be trained, together with its data."""
    model = config.model
    if model.hf_config is None:
        check_model(model)
        check_expert_options(model)
    else:
        _check_family(model)
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
    if config.dataset.seq_length != model.seq_length:
        raise ConfigError(
            f"dataset.seq_length={config.dataset.seq_length} and model.seq_length={model.seq_length} must be the same; "
            "set both."
        )


_OF_FAMILIES = frozenset(
    {
        "hf_model",
        "hf_config",
        "trust_remote_code",
        "seq_length",
        "vocab_size",
        "chunked_loss",
        "recompute_granularity",
        "recompute_interval",
        "offload_activations",
        "fused_linear_loss",
    }
)
"""The options of a model whose class is that of `transformers`; all others are in its `config.json`."""


def _check_family(model: ModelConfig) -> None:
    """Refuse options of the built-in transformer for a class of `transformers`."""
    foreign = {name: value for name, value in model.changed().items() if name not in _OF_FAMILIES}
    if foreign:
        name, value = next(iter(foreign.items()))
        kind = (model.hf_config or {}).get("model_type")
        raise ConfigError(
            f"model.{name}={shown(value)} is an option of Onstep's own model, but the model is transformers' of the "
            f"type {shown(kind)}, which its config.json describes; drop the option, or change config.json."
        )


def check_model(model: ModelConfig) -> None:
    """Check sizes and positions against each other.

    Raises:
        ConfigError: the first rule that is broken, with the values and the remedy.
    """
    heads, groups = model.num_attention_heads, model.num_query_groups
    if model.kv_channels is None and model.hidden_size % heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} must be a multiple of num_attention_heads={heads}; "
            "change one of them, or set model.kv_channels (the width of a head)."
        )
    if groups is not None and heads % groups:
        raise ConfigError(
            f"model.num_attention_heads={heads} must be a multiple of num_query_groups={groups}; "
            "each key/value head serves the same number of query heads."
        )
    kind, scaling = model.position_embedding_type, model.rope_scaling
    width = model.kv_channels or model.hidden_size // heads
    if kind != "rope" and scaling:
        raise ConfigError(
            f"model.rope_scaling={scaling} stretches rotary positions, but model.position_embedding_type={kind} "
            "has none; set rope_scaling to null, or position_embedding_type to rope."
        )
    if kind == "rope" and width % 2:
        raise ConfigError(
            f"the width of a head is {width}, and rotary embeddings require an even width "
            f"(hidden_size={model.hidden_size}, num_attention_heads={heads}, kv_channels={model.kv_channels}); change "
            "the number of heads, set an even model.kv_channels, or use another position_embedding_type."
        )
    if kind == "rope" and scaling is not None:
        _check_rope_scaling(scaling, width)


def _check_rope_scaling(scaling: Mapping[str, Any], width: int) -> None:
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in _ROPE_NUMBERS:
        hint = nearest(kind, list(_ROPE_NUMBERS)) if isinstance(kind, str) else ""
        raise ConfigError(
            f"model.rope_scaling has rope_type {shown(kind)}, which must be {' | '.join(_ROPE_NUMBERS)}.{hint}"
        )
    _check_rope_keys(scaling, kind)
    for name, value in scaling.items():
        if name in ("rope_type", "type", "truncate") or value is None:
            continue
        is_finite = is_number(value) and math.isfinite(value)
        if name == "factor" and not (is_finite and value >= 1):
            rule = "a number >= 1 (how many times longer the sequences are)"
            raise ConfigError(f"model.rope_scaling.factor must be {rule}, got {value!r}.")
        if not (is_finite and value > 0):
            raise ConfigError(f"model.rope_scaling.{name} must be a finite number > 0, got {value!r}.")
    if kind == "dynamic" and width < 4:
        raise ConfigError(
            f"model.rope_scaling of type dynamic requires heads of width 4 or more, got {width}; use linear, or wider "
            "heads."
        )
    if kind in ("llama3", "yarn"):
        names = ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ("beta_slow", "beta_fast")
        low, high = (scaling.get(name) for name in names)
        low, high = 1.0 if low is None else low, 32.0 if high is None else high
        if low >= high:
            raise ConfigError(
                f"model.rope_scaling.{names[0]}={low} must be below {names[1]}={high}; between the two the frequencies "
                "are blended."
            )


def _check_rope_keys(scaling: Mapping[str, Any], kind: str) -> None:
    required, optional = _ROPE_NUMBERS[kind]
    for name in scaling:
        if name == "rope_theta":
            raise ConfigError(f"model.rope_scaling has rope_theta={scaling[name]}; set model.rotary_base instead.")
        if name not in ("rope_type", "type", *required, *optional):
            hint = nearest(name, [*required, *optional])
            known = ", ".join((*required, *optional)) or "no numbers"
            raise ConfigError(f"model.rope_scaling has {shown(name)}, but rope_type {kind} accepts {known}.{hint}")
    missing = [name for name in required if scaling.get(name) is None]
    if missing:
        raise ConfigError(
            f"model.rope_scaling={dict(scaling)} lacks {', '.join(missing)}; rope_type {kind} requires "
            f"{', '.join(required)}."
        )


def check_expert_options(model: ModelConfig) -> None:
    """Check that a model can be built with its options for experts and multi-token prediction, trained or not.

    Raises:
        ConfigError: the first rule that is broken, with the values and the remedy.
    """
    depths = model.mtp_num_layers
    if depths is not None and depths >= model.seq_length:
        raise ConfigError(
            f"model.mtp_num_layers={depths} must be below model.seq_length={model.seq_length}: depth d predicts the "
            "token d places after the next, which a shorter sequence does not have."
        )
    if not depths and "mtp_loss_scaling_factor" in model.changed():
        raise ConfigError(
            f"model.mtp_loss_scaling_factor={model.mtp_loss_scaling_factor} weights the loss of multi-token "
            "prediction, and there is none; set model.mtp_num_layers, or leave the factor at its default."
        )
    _check_balancing(model)
    changed = {name: value for name, value in model.changed().items() if name.startswith("moe_")}
    if model.num_moe_experts is not None:
        _check_router(model, model.num_moe_experts)
        _check_idle(model, changed)
    elif changed:  # options of experts in a model without experts are a mistake
        found = ", ".join(f"model.{name}={value}" for name, value in changed.items())
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
                f"model.moe_router_load_balancing_type={shown(kinds)} must be one of {' | '.join(BALANCING_TYPES)}."
                f"{nearest(str(name), list(BALANCING_TYPES))}"
            )
    if not names or len(set(names)) < len(names) or ("none" in names and len(names) > 1):
        raise ConfigError(
            f"model.moe_router_load_balancing_type={shown(kinds)} must name each type once, and 'none' alone; for no "
            "load-balancing loss write 'none'."
        )
    values = [coefficients] * len(names) if isinstance(coefficients, (int, float)) else list(coefficients)
    if len(values) != len(names):
        raise ConfigError(
            f"model.moe_aux_loss_coeff={coefficients} has {len(values)} entries and "
            f"model.moe_router_load_balancing_type={shown(kinds)} {len(names)}; give one coefficient for each type, or "
            "one number for all."
        )
    if any(value < 0 for value in values):
        raise ConfigError(f"model.moe_aux_loss_coeff={coefficients} must be >= 0; 0 disables the loss.")


def _check_router(model: ModelConfig, experts: int) -> None:
    if model.moe_router_topk > experts:
        raise ConfigError(
            f"model.moe_router_topk={model.moe_router_topk} must be at most model.num_moe_experts={experts}: a token "
            "goes to each expert once; lower it, or add experts."
        )
    frequency = model.moe_layer_freq
    if isinstance(frequency, int) and frequency < 1:
        raise ConfigError(
            f"model.moe_layer_freq={frequency} must be >= 1: every n-th layer from the first has experts."
        )
    if isinstance(frequency, list):
        if len(frequency) != model.num_layers or any(one not in (0, 1) for one in frequency):
            raise ConfigError(
                f"model.moe_layer_freq={frequency} must have a 0 or 1 for each of the {model.num_layers} layers "
                "(model.num_layers), or be an integer."
            )
        if not any(frequency):
            raise ConfigError(
                f"model.moe_layer_freq={frequency} leaves no layer with experts, but model.num_moe_experts={experts}; "
                "set a layer to 1, or num_moe_experts to null."
            )
    if model.moe_shared_expert_gate and model.moe_shared_expert_intermediate_size is None:
        raise ConfigError(
            "model.moe_shared_expert_gate=true gates a shared expert, and there is none; set "
            "model.moe_shared_expert_intermediate_size to its width, or the gate to false."
        )


def _check_idle(model: ModelConfig, changed: Mapping[str, Any]) -> None:
    """Refuse an option that has no effect in combination with the others: it is a mistake."""
    coefficients = model.moe_aux_loss_coeff
    has_weight = any(coefficients) if isinstance(coefficients, list) else coefficients != 0
    is_balanced = model.moe_router_load_balancing_type not in ("none", ["none"])
    needs: dict[str, tuple[bool, str]] = {
        "moe_router_pre_softmax": (model.moe_router_score_function == "softmax", "moe_router_score_function=softmax"),
        "moe_router_bias_update_rate": (model.moe_router_enable_expert_bias, "moe_router_enable_expert_bias=true"),
        "moe_token_drop_policy": (model.moe_expert_capacity_factor is not None, "a moe_expert_capacity_factor"),
        "moe_aux_loss_coeff": (is_balanced or not has_weight, "a moe_router_load_balancing_type"),
    }
    for name, (acts, need) in needs.items():
        if name in changed and not acts:
            raise ConfigError(
                f"model.{name}={changed[name]} does nothing without {need}; set that, or leave {name} at its default."
            )


def check_lora_targets(config: ConfigContainer) -> None:
    """Refuse a suffix in `peft.target_modules` that matches no projection of the configured model."""
    if config.peft.peft_scheme is None or config.peft.target_modules is None or config.model.hf_config is not None:
        return
    layers = [_projections(config.model, index) for index in range(config.model.num_layers)]
    names = [
        name
        for index, projections in enumerate(layers)
        for ours in projections
        for name in (f"layers.{index}.{ours}", f"model.layers.{index}.{LORA_PROJECTIONS[ours]}")
    ]
    for target in config.peft.target_modules:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            ends = list(dict.fromkeys(ours.rpartition(".")[2] for projections in layers for ours in projections))
            raise ConfigError(
                f"peft.target_modules has {shown(target)}, which no projection of the layers ends with."
                f"{nearest(target, ends)} Ends: {', '.join(ends)}, or transformers' names of these."
            )


def _projections(model: ModelConfig, layer: int) -> list[str]:
    """The projections of a layer; the stacked matrices of experts are not among them."""
    frequency = model.moe_layer_freq
    has_experts = frequency[layer] if isinstance(frequency, list) else layer % frequency == 0
    is_moe = model.num_moe_experts is not None and has_experts
    return [
        name
        for name in LORA_PROJECTIONS
        if name.startswith("attention.") or (not is_moe and (model.gated_linear_unit or name != "feed_forward.gate"))
    ]
