"""Weights to and from the names of `transformers`' Llama and Qwen2 (no `transformers` needed)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from onstep.config.parts import ModelConfig
from onstep.errors import OnstepError
from onstep.models.transformer import Transformer, empty_transformer

_OUTSIDE_LAYERS = {
    "embedding.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_IN_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}

_SHOWN = 5
"""Names listed in an error."""


def to_hf_state_dict(model: Transformer) -> dict[str, Tensor]:
    """The weights under `transformers`' names, sharing memory with the model; tied ones once, as the embedding."""
    return {hf_name(name): tensor for name, tensor in model.state_dict().items()}


def from_hf_state_dict(config: ModelConfig, state: Mapping[str, Tensor]) -> Transformer:
    """A model of `config` with the weights of a `transformers` Llama or Qwen2, copied into float32 on the CPU.

    A tied model's `lm_head.weight` may be absent, or equal to the embedding.

    Raises:
        ConfigError: a configuration that cannot be built.
        OnstepError: missing, unknown or misshaped weights.
    """
    model = empty_transformer(config)
    own = model.state_dict()
    by_hf_name = {hf_name(name): tensor for name, tensor in own.items()}
    given = {name: tensor for name, tensor in state.items() if not name.endswith("rotary_emb.inv_freq")}
    if model.output is None:
        given = _without_tied_output(given)
    _check_weights(by_hf_name, given)
    with torch.no_grad():
        for name, tensor in by_hf_name.items():
            tensor.copy_(given[name])
    return model


def hf_name(name: str) -> str:
    """`transformers`' name for the weight that `Transformer` calls `name`."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    prefix, index, rest = name.split(".", 2)
    module, kind = rest.rsplit(".", 1)
    return f"model.{prefix}.{index}.{_IN_LAYER[module]}.{kind}"


def _without_tied_output(given: dict[str, Tensor]) -> dict[str, Tensor]:
    embedding, output = (given.get(_OUTSIDE_LAYERS[name]) for name in ("embedding.weight", "output.weight"))
    if embedding is not None and output is not None and not torch.equal(embedding, output):
        raise OnstepError(
            "the weights hold an lm_head.weight that differs from model.embed_tokens.weight, but the configuration "
            "ties them; set tie_word_embeddings (share_embeddings_and_output_weights) to false."
        )
    return {name: tensor for name, tensor in given.items() if name != _OUTSIDE_LAYERS["output.weight"]}


def _check_weights(expected: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    misshaped = [
        f"{name} is {tuple(given[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in given and given[name].shape != tensor.shape
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": misshaped}
    found = [f"{len(names)} {kind} ({_first(names)})" for kind, names in problems.items() if names]
    if found:
        raise OnstepError(
            f"the weights do not fit the model's configuration: {'; '.join(found)}. "
            "Use the configuration that the weights were saved with."
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
