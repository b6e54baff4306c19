"""Gives the weights of a Llama that torchtitan has trained the names and the layout of `transformers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from onstep.errors import CheckpointError

_OUTSIDE = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_INSIDE = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_HEADS = {"attention.wq": "num_attention_heads", "attention.wk": "num_key_value_heads"}
"""The projections whose rows are rotated, and the key of the configuration with their number of heads."""
_BLOCK = re.compile(r"layers\.(\d+)\.(.+)\.weight")


_NOT_OF_THE_MODEL = ("optimizer.", "lr_scheduler.", "dataloader.", "train_state.", "freqs_cis")
"""What other names of a checkpoint of torchtitan begin with."""


def is_of_torchtitan(names: Iterable[str]) -> bool:
    """Whether the names are those of the Llama of torchtitan (and of Meta), with nothing else but its training."""
    found = {name for name in names if not name.startswith(_NOT_OF_THE_MODEL)}
    return "tok_embeddings.weight" in found and all(_renamed(name) is not None for name in found)


def of_transformers(tensors: Mapping[str, Tensor], config: Path) -> dict[str, Tensor]:
    """The weights as `LlamaForCausalLM` of `transformers` has them.

    Torchtitan rotates neighboring pairs of a head's rows, transformers each row of the first half with one of the
    second: rows of queries and keys change places.

    Args:
        tensors: the weights by torchtitan's names, which others are left out of; deferred ones stay deferred.
        config: the `config.json` of the model.

    Raises:
        CheckpointError: if that is not of a Llama, or of one with other sizes.
    """
    content = json.loads(config.read_text(encoding="utf-8"))
    if content.get("model_type") != "llama":
        raise CheckpointError(
            f"{config} is of the family {content.get('model_type')!r}, but the tensors have the names of torchtitan's "
            f"llama; give the directory of a llama of the same sizes with --config-from."
        )
    found = {}
    for name, tensor in tensors.items():
        new = _renamed(name)
        if new is not None:
            found[new] = _in_halves(name, tensor, content, config)
    return found


def _renamed(name: str) -> str | None:
    block = _BLOCK.fullmatch(name)
    if block is None:
        return _OUTSIDE.get(name)
    inner = _INSIDE.get(block[2])
    return None if inner is None else f"model.layers.{block[1]}.{inner}.weight"


def _in_halves(name: str, tensor: Tensor, content: Mapping[str, Any], config: Path) -> Tensor:
    """The rows of each head in the order of transformers, if they are rotated."""
    block = _BLOCK.fullmatch(name)
    key = None if block is None else _HEADS.get(block[2])
    if key is None:
        return tensor
    heads = content.get(key) or content["num_attention_heads"]
    size = content.get("head_dim") or content["hidden_size"] // content["num_attention_heads"]
    rows, columns = tensor.shape
    if rows != heads * size:
        raise CheckpointError(
            f"{name} has {rows} rows, but {config} has {heads} heads of {size}; give the configuration of the model "
            f"with --config-from."
        )
    return tensor.view(heads, size // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
