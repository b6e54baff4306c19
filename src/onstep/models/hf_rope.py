"""Rotary positions in `config.json`: where transformers 4 and 5 write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.config.parts import ModelConfig
from onstep.models.rope_scaling import scaling_type

_NOT_OURS = ("rope_theta", "type", "partial_rotary_factor")
_NEEDS_ORIGINAL = ("llama3", "yarn")
_KNOWN = ("default", "linear", "dynamic", *_NEEDS_ORIGINAL)


def rope_settings(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of transformers 5, over `rope_theta` and `rope_scaling` of transformers 4."""
    old = {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
    return old | (hf_config.get("rope_scaling") or {}) | (hf_config.get("rope_parameters") or {})


def our_scaling(hf_config: Mapping[str, Any], seq_length: int) -> dict[str, Any] | None:
    """`model.rope_scaling` of a file; None where the positions are plain.

    Llama 3 and YaRN get the original length that a file leaves to its `max_position_embeddings`, so that another
    `seq_length` does not change the model.
    """
    settings = rope_settings(hf_config)
    kind = scaling_type(settings)
    if kind == "default":
        return None
    scaling = {name: value for name, value in settings.items() if name not in _NOT_OURS and value is not None}
    scaling = {"rope_type": kind} | scaling
    if kind in _NEEDS_ORIGINAL:
        original = hf_config.get("original_max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", original or seq_length)
    else:
        scaling.pop("original_max_position_embeddings", None)  # not read there either
    return scaling


def rope_features(hf_config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings of the positions that `Transformer` does not have; see `check_features`."""
    settings = rope_settings(hf_config)
    kind = scaling_type(settings)
    share = settings.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    return {
        "rope_type": (kind, kind if kind in _KNOWN else "default"),
        "rope_parameters by layer type": (any(isinstance(value, dict) for value in settings.values()), False),
        "partial_rotary_factor": (1.0 if share is None else share, 1.0),
    }


def describe_rope(config: ModelConfig) -> dict[str, Any]:
    """The positions of `config` for transformers 5 and 4."""
    scaling = None if config.rope_scaling is None else dict(config.rope_scaling)
    if scaling is not None:
        scaling = {"rope_type": scaling_type(scaling)} | {k: v for k, v in scaling.items() if k != "type"}
    described = {
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": config.rotary_base},
        "rope_theta": config.rotary_base,  # where transformers 4 looks
    }
    return described | ({} if scaling is None else {"rope_scaling": scaling})
