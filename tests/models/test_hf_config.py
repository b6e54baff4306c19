import dataclasses

import pytest
from transformers import GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import config_from_hf, head_width, hf_config_dict, num_query_groups

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 40}
PLAIN = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("add_qkv_bias", [False, True])
@pytest.mark.parametrize("share", [False, True])
def test_a_config_comes_back_from_its_hf_form(add_qkv_bias, share):
    config = ModelConfig(
        **SIZES,
        ffn_hidden_size=48,
        kv_channels=8,
        seq_length=77,
        rotary_base=5000.0,
        layernorm_epsilon=3e-6,
        add_qkv_bias=add_qkv_bias,
        share_embeddings_and_output_weights=share,
        init_method_std=0.03,
        attention_dropout=0.1,
    )

    assert dataclasses.asdict(config_from_hf(hf_config_dict(config))) == dataclasses.asdict(config)


@pytest.mark.parametrize(("bias", "hf_class"), [(False, LlamaConfig), (True, Qwen2Config)])
def test_transformers_reads_the_same_sizes(bias, hf_class):
    described = hf_config_dict(ModelConfig(**SIZES, add_qkv_bias=bias, rotary_base=5000.0), eos_id=3)
    read = hf_class(**described)

    assert (read.model_type, read.architectures) == (described["model_type"], described["architectures"])
    assert (read.intermediate_size, read.head_dim, read.num_key_value_heads) == (128, 8, 2)
    assert read.rope_parameters["rope_theta"] == 5000.0
    assert (read.bos_token_id, read.eos_token_id) == (None, 3)


def test_open_fields_have_the_defaults_of_transformers():
    config = config_from_hf(PLAIN)

    assert (config.layernorm_epsilon, config.rotary_base) == (1e-6, 10000.0)
    assert (config.num_query_groups, config.add_qkv_bias, config.share_embeddings_and_output_weights) == (
        None,
        False,
        False,
    )


@pytest.mark.parametrize("hf_class", [LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, GPT2Config])
def test_what_a_file_leaves_out_is_what_transformers_takes(hf_class):
    """The file with its sizes alone is the same model as the one where transformers has written out all the rest."""
    sizes = {"vocab_size": 40, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 64}
    if hf_class is GPT2Config:
        sizes = {"vocab_size": 40, "n_embd": 64, "n_layer": 2, "n_head": 4}
    whole = hf_class(**sizes).to_dict()
    if hf_class is Qwen3MoeConfig:
        whole["head_dim"] = whole.get("head_dim") or 2  # no field of the class: hidden_size / num_attention_heads
    found, expected = config_from_hf({"model_type": hf_class.model_type, **sizes}), config_from_hf(whole)
    assert filled(found) == filled(expected)
    assert found.seq_length == whole.get("max_position_embeddings", whole.get("n_positions"))
    assert num_query_groups(found) == whole.get("num_key_value_heads", 4)


def filled(config):
    return dataclasses.replace(config, num_query_groups=num_query_groups(config), kv_channels=head_width(config))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 123.0},
        {"rope_theta": 123.0, "rope_scaling": None},
        {"rope_theta": 123.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}},
    ],
)
def test_rotary_base_is_read_where_transformers_4_or_5_put_it(rope):
    assert config_from_hf(PLAIN | rope).rotary_base == 123.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'; only llama, qwen2, qwen3, "),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type = 'longrope'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "lacks factor, low_freq_factor, high_freq"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1]}},
            "'mrope_section', but rope_type",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters by layer type"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"hidden_act": "quick_gelu"}, "activation function 'quick_gelu'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .*sliding_attention"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config = .*gptq"),
        ({"vocab_size": None, "hidden_size": None}, "has no vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "multiple of num_query_groups"),
    ],
)
def test_what_the_model_would_compute_differently_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(PLAIN | changes)


def test_sizes_that_transformers_refuses_are_refused_before_writing():
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM is the closest.*hidden_size=34, not a multiple"):
        hf_config_dict(ModelConfig(vocab_size=40, hidden_size=34, kv_channels=8))
