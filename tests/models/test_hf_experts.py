import json

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from onstep.config import ModelConfig
from onstep.errors import ConfigError
from onstep.models import build_transformer, config_from_hf, from_hf_state_dict, load_hf, save_hf, to_hf_state_dict

TOKENS = torch.randint(0, 40, (2, 50), generator=torch.Generator().manual_seed(0))

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 40, "qk_layernorm": True, "num_moe_experts": 4}

KINDS = {
    "normed": {"norm_topk_prob": True},
    "not normed": {"norm_topk_prob": False},
    "every second": {"decoder_sparse_step": 2, "norm_topk_prob": True},
    "dense ones": {"mlp_only_layers": [1], "norm_topk_prob": True, "num_experts_per_tok": 3},
    "tied": {"tie_word_embeddings": True, "norm_topk_prob": True},
}


def hf_model(**options):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "max_position_embeddings": 64,
            "initializer_range": 0.3,
            "rms_norm_eps": 1e-4,
            **options,
        }
    )
    model = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
            if parameter.dim() == 3 or name.endswith("mlp.gate.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_transformers_has_the_same_logits_here_and_back_again(kind, tmp_path):
    theirs = hf_model(**KINDS[kind])
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        from_modules = from_hf_state_dict(config_from_hf(theirs.config.to_dict()), theirs.state_dict()).eval()
        torch.testing.assert_close(from_modules(TOKENS), expected, rtol=0, atol=1e-4)

        theirs.save_pretrained(tmp_path / "theirs")
        ours = load_hf(tmp_path / "theirs").eval()
        assert torch.equal(ours(TOKENS), from_modules(TOKENS))

        save_hf(ours, tmp_path / "ours")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).eval()
        assert isinstance(back, Qwen3MoeForCausalLM)
        torch.testing.assert_close(back(TOKENS).logits, expected, rtol=0, atol=1e-4)
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(back.state_dict()[name], tensor), name


def test_files_name_each_expert_and_the_configuration_says_how_they_are_chosen(tmp_path):
    config = ModelConfig(
        num_layers=3,
        **SIZES,
        num_query_groups=2,
        kv_channels=8,
        ffn_hidden_size=48,
        moe_ffn_hidden_size=24,
        moe_router_topk=3,
        moe_layer_freq=[0, 1, 1],
        moe_router_pre_softmax=True,
    )
    model = build_transformer(config, seed=0)
    state = to_hf_state_dict(model)
    assert state["model.layers.1.mlp.experts.2.up_proj.weight"].shape == (24, 32)
    assert torch.equal(
        state["model.layers.2.mlp.experts.3.down_proj.weight"], model.layers[2].feed_forward.experts.down_weight[3]
    )
    save_hf(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "qwen3_moe"
    assert (written["num_experts"], written["num_experts_per_tok"], written["norm_topk_prob"]) == (4, 3, False)
    assert written["mlp_only_layers"] == [0]
    assert load_hf(tmp_path).config == model.config


@pytest.mark.parametrize(
    "option",
    [
        {"moe_shared_expert_intermediate_size": 16},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_enable_expert_bias": True},
        {"moe_router_topk_scaling_factor": 2.0},
        {"mtp_num_layers": 1},
    ],
)
def test_what_qwen3_moe_does_not_compute_is_refused_by_name(option, tmp_path):
    config = ModelConfig(num_layers=1, **SIZES, **option)
    name, value = next(iter(option.items()))
    with pytest.raises(ConfigError, match=f"Qwen3MoeForCausalLM is the closest, but does not support {name}={value!r}"):
        save_hf(build_transformer(config, seed=0), tmp_path)


def test_a_model_that_drops_in_training_computes_the_same_there(tmp_path):
    config = ModelConfig(num_layers=1, moe_expert_capacity_factor=0.5, **SIZES)
    model = build_transformer(config, seed=0).eval()
    save_hf(model, tmp_path)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits
        torch.testing.assert_close(model(TOKENS), theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("without", [{"num_experts": 0}, {"mlp_only_layers": [0, 1, 2]}, {"decoder_sparse_step": 5}])
def test_a_qwen3_moe_without_experts_is_dense(without):
    theirs = hf_model(**without)
    ours = from_hf_state_dict(config_from_hf(theirs.config.to_dict()), theirs.state_dict()).eval()
    assert ours.config.num_moe_experts is None
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS), theirs(TOKENS).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"num_experts_per_tok": 0}, "moe_router_topk=0"), ({"decoder_sparse_step": 0}, "decoder_sparse_step=0")],
)
def test_numbers_of_zero_are_not_taken_for_left_out(values, message):
    with pytest.raises(ConfigError, match=message):
        config_from_hf(hf_model().config.to_dict() | values)
