"""Decoder-only transformers of the Llama/Qwen2 family, generation, and conversion to and from `transformers`."""

from onstep.models.cache import KeyValueCache
from onstep.models.generation import generate
from onstep.models.hf_config import config_from_hf, hf_config_dict
from onstep.models.hf_directory import load_hf, save_hf
from onstep.models.hf_weights import from_hf_state_dict, to_hf_state_dict
from onstep.models.init import init_weights
from onstep.models.sizes import check_model_config, ffn_hidden_size, head_width, num_query_groups
from onstep.models.transformer import Transformer, build_transformer

__all__ = [
    "KeyValueCache",
    "Transformer",
    "build_transformer",
    "check_model_config",
    "config_from_hf",
    "ffn_hidden_size",
    "from_hf_state_dict",
    "generate",
    "head_width",
    "hf_config_dict",
    "init_weights",
    "load_hf",
    "num_query_groups",
    "save_hf",
    "to_hf_state_dict",
]
