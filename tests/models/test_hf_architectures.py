import dataclasses
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from onstep.config import ModelConfig
from onstep.errors import ConfigError, OnstepError
from onstep.models import (
    Transformer,
    build_transformer,
    config_from_hf,
    from_hf_state_dict,
    generate,
    head_width,
    hf_config_dict,
    load_hf,
    save_hf,
    to_hf_state_dict,
)

TOKENS = torch.randint(0, 40, (2, 60), generator=torch.Generator().manual_seed(0))
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "rms_norm_eps": 1e-4,
}
GPT2 = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THEIRS = {
    "llama 3": LlamaConfig(**SIZES, rope_parameters=LLAMA3, head_dim=16),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama, dynamic": LlamaConfig(
        **(SIZES | {"max_position_embeddings": 32}),
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0},
    ),
    "llama, linear, gelu": LlamaConfig(
        **SIZES,
        rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        hidden_act="gelu_pytorch_tanh",
    ),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2, yarn": Qwen2Config(**SIZES, rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3, odd": Qwen3Config(**(SIZES | {"hidden_size": 36, "num_attention_heads": 8}), head_dim=8),
    "gpt2": GPT2Config(**GPT2, **NO_DROPOUT),
    "gpt2, relu, wide": GPT2Config(**GPT2, **NO_DROPOUT, n_inner=50, activation_function="relu"),
    "gpt2, untied": GPT2Config(**GPT2, **NO_DROPOUT, tie_word_embeddings=False, layer_norm_epsilon=1e-2),
}
EVERY_ARCHITECTURE = pytest.mark.parametrize("name", THEIRS)


def their_model(name):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(THEIRS[name]).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake in them would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def check_same(ours, theirs):
    # theirs computes norms and angles in float32 whatever the weights are, on each CPU in another order
    torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)
    ours, theirs = ours.double(), theirs.double()
    expected = theirs(TOKENS).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-4)


@EVERY_ARCHITECTURE
def test_a_saved_model_of_transformers_has_the_same_logits_here_and_back_again(name, tmp_path):
    theirs = their_model(name)
    theirs.save_pretrained(tmp_path / "theirs")

    ours = load_hf(tmp_path / "theirs").eval()
    save_hf(ours, tmp_path / "back")
    back, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)

    assert type(back) is type(theirs)
    assert {kind: found for kind, found in loading.items() if found} == {}
    check_same(load_hf(tmp_path / "back"), back)
    check_same(ours, theirs)


@EVERY_ARCHITECTURE
def test_a_config_comes_back_from_its_hf_form(name):
    config = config_from_hf(THEIRS[name].to_dict())
    config.kv_channels = head_width(config)
    again = config_from_hf(json.loads(json.dumps(hf_config_dict(config))))

    again.kv_channels = head_width(again)

    assert dataclasses.asdict(again) == dataclasses.asdict(config)


@EVERY_ARCHITECTURE
def test_generated_text_is_that_of_transformers(name):
    theirs = their_model(name)
    ours = from_hf_state_dict(config_from_hf(theirs.config.to_dict()), theirs.state_dict())
    prompt = TOKENS[:, :20]

    expected = theirs.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=False,
    )

    assert torch.equal(generate(ours, prompt, max_new_tokens=30, temperature=0), expected)


def test_weights_of_the_bare_gpt2_with_their_old_masks_are_read():
    theirs = their_model("gpt2")
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.state_dict().items()}
    del state["lm_head.weight"]
    state["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    state["h.1.attn.masked_bias"] = torch.tensor(-1e4)

    check_same(from_hf_state_dict(config_from_hf(theirs.config.to_dict()), state).eval(), theirs)


def test_misfits_of_fused_weights_are_named_as_transformers_names_them():
    theirs = their_model("gpt2")
    state = theirs.state_dict()
    state["transformer.h.0.attn.c_attn.weight"] = torch.ones(32, 95)
    del state["transformer.h.1.mlp.c_fc.bias"]

    with pytest.raises(OnstepError) as caught:
        from_hf_state_dict(config_from_hf(theirs.config.to_dict()), state)

    assert "1 missing (transformer.h.1.mlp.c_fc.bias)" in str(caught.value)
    assert "1 with a different shape (transformer.h.0.attn.c_attn.weight is (32, 95), not" in str(caught.value)


def test_the_original_length_of_a_llama_3_stays_when_its_sequences_become_shorter():
    described = THEIRS["llama 3"].to_dict()
    del described["rope_parameters"]["original_max_position_embeddings"]

    config = config_from_hf(described)
    config.seq_length = 16

    assert hf_config_dict(config)["rope_parameters"]["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False"),
        ({"add_cross_attention": True}, "add_cross_attention = True"),
        ({"embd_pdrop": 0.3}, "embd_pdrop = 0.3"),
        ({"activation_function": "tanh"}, "activation function 'tanh'"),
        ({"n_embd": None}, "config.json has no n_embd"),
        ({"model_type": "gpt"}, "Did you mean 'gpt2'"),
    ],
)
def test_what_another_gpt2_computes_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(GPT2Config(**GPT2).to_dict() | changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalization": "LayerNorm"}, "LlamaForCausalLM is the closest.* not support normalization='LayerNorm'"),
        ({"qk_layernorm": True, "add_qkv_bias": True}, "does not support qk_layernorm=True|add_qkv_bias=True"),
        ({"position_embedding_type": "none"}, "position_embedding_type='none'"),
    ],
)
def test_a_model_that_no_architecture_computes_is_refused_with_what_is_in_the_way(options, message, tmp_path):
    model = build_transformer(ModelConfig(vocab_size=40, hidden_size=32, **options), seed=0)

    with pytest.raises(ConfigError, match=message):
        save_hf(model, tmp_path / "out")
    with pytest.raises(ConfigError, match=message):
        to_hf_state_dict(model)
    assert not (tmp_path / "out").exists()


LLAMA32 = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "tie_word_embeddings": True,
}
QWEN25 = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
}
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
PUBLISHED = {  # the config.json of each on its page, shortened to what is read, and its number of parameters
    "gpt2": ({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "meta-llama/Llama-3.2-1B": (LLAMA32, 1_235_814_400),
    "Qwen/Qwen2.5-0.5B": (QWEN25, 494_032_768),
    "Qwen/Qwen3-0.6B": (QWEN3, 596_049_920),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name):
    described, parameters = PUBLISHED[name]

    with torch.device("meta"):
        model = Transformer(config_from_hf(described))

    assert model.num_parameters() == parameters
