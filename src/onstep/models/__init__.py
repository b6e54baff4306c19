"""Provides decoder-only transformers (Llama, Qwen, GPT-2), value heads, generation and conversion to `transformers`.

`transformer` is the model and `layers/` its parts, `heads` and `multi_token_prediction` are its outputs, and
`vocabulary_loss` is their loss; `generation/` continues prompts, `hf/` converts to and from `transformers`.
"""

from onstep.models.generation.generate import generate
from onstep.models.heads import (
    LinearForLastLayer,
    ModelHook,
    ModelList,
    create_value_head_hook,
    ensure_model_list,
    make_value_model,
)
from onstep.models.hf.directory import (
    config_from_hf,
    from_hf_state_dict,
    hf_config_dict,
    load_hf,
)
from onstep.models.hf.writing import hf_obstacle, save_hf, to_hf_state_dict
from onstep.models.initial_weights import init_weights
from onstep.models.layers.feed_forward import MixtureOfExperts, is_moe_layer
from onstep.models.layers.router import Router
from onstep.models.layers.routing_record import is_recomputing
from onstep.models.layers.sequence_context import KeyValueCache
from onstep.models.sizes import check_model_config, ffn_hidden_size, head_width, num_query_groups
from onstep.models.transformer import Transformer, build_transformer
from onstep.models.vocabulary_loss import linear_cross_entropy

__all__ = [
    "KeyValueCache",
    "LinearForLastLayer",
    "MixtureOfExperts",
    "ModelHook",
    "ModelList",
    "Router",
    "Transformer",
    "build_transformer",
    "check_model_config",
    "config_from_hf",
    "create_value_head_hook",
    "ensure_model_list",
    "ffn_hidden_size",
    "from_hf_state_dict",
    "generate",
    "head_width",
    "hf_config_dict",
    "hf_obstacle",
    "init_weights",
    "is_moe_layer",
    "is_recomputing",
    "linear_cross_entropy",
    "load_hf",
    "make_value_model",
    "num_query_groups",
    "save_hf",
    "to_hf_state_dict",
]
