import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from onstep.config import ModelConfig
from onstep.errors import OnstepError
from onstep.models import build_transformer, config_from_hf, from_hf_state_dict, to_hf_state_dict

CLASSES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2, "vocab_size": 40}
TOKENS = torch.randint(0, 40, (2, 50), generator=torch.Generator().manual_seed(0))


def hf_model(name, *, tied, groups):
    config_class, model_class = CLASSES[name]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=groups,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        rms_norm_eps=1e-4,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    model = model_class(config).eval()
    with torch.no_grad():  # biases and norms start at 0 and 1, where a mistake in them would not show
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_a_model_of_transformers_has_the_same_logits_here_and_back_again(name, tied, groups):
    theirs = hf_model(name, tied=tied, groups=groups)
    with torch.no_grad():
        expected = theirs(TOKENS).logits

        ours = from_hf_state_dict(config_from_hf(theirs.config.to_dict()), theirs.state_dict())
        torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-5)

        back = hf_model(name, tied=tied, groups=groups)
        for parameter in back.parameters():
            parameter.zero_()
        loaded = back.load_state_dict(to_hf_state_dict(ours), strict=not tied)
        assert loaded.missing_keys == (["lm_head.weight"] if tied else [])
        torch.testing.assert_close(back(TOKENS).logits, expected, rtol=0, atol=1e-5)


def test_weights_are_copied_into_float32():
    config = ModelConfig(**SIZES)
    state = {name: tensor.bfloat16() for name, tensor in to_hf_state_dict(build_transformer(config, seed=0)).items()}

    model = from_hf_state_dict(config, state)
    state["model.norm.weight"].zero_()

    assert model.embedding.weight.dtype == torch.float32
    assert torch.equal(model.embedding.weight, state["model.embed_tokens.weight"].float())
    assert model.final_norm.weight.min() == 1


def test_exported_weights_share_memory_and_hold_tied_ones_once():
    model = build_transformer(ModelConfig(**SIZES, share_embeddings_and_output_weights=True), seed=0)
    state = to_hf_state_dict(model)

    assert "lm_head.weight" not in state
    assert state["model.embed_tokens.weight"].data_ptr() == model.embedding.weight.data_ptr()


def test_weights_that_do_not_fit_are_named():
    config = ModelConfig(**SIZES)
    state = to_hf_state_dict(build_transformer(config, seed=0))
    del state["model.norm.weight"]
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    state["lm_head.weight"] = torch.ones(41, 32)

    with pytest.raises(OnstepError) as caught:
        from_hf_state_dict(config, state)

    message = str(caught.value)
    assert "1 missing (model.norm.weight)" in message
    assert "1 unknown (model.layers.0.self_attn.q_norm.weight)" in message
    assert "1 with a different shape (lm_head.weight is (41, 32), not (40, 32))" in message


def test_a_long_list_of_misfits_is_shortened():
    with pytest.raises(OnstepError, match=r"21 missing \(model.embed_tokens.weight, .*, \.\.\.\)"):
        from_hf_state_dict(ModelConfig(**SIZES), {})


def test_frequency_buffers_of_old_llama_files_are_left_out():
    config = ModelConfig(**SIZES)
    state = to_hf_state_dict(build_transformer(config, seed=0))
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    assert from_hf_state_dict(config, state).num_parameters() == build_transformer(config).num_parameters()


def test_an_output_that_differs_from_its_tied_embedding_is_refused():
    config = ModelConfig(**SIZES, share_embeddings_and_output_weights=True)
    state = to_hf_state_dict(build_transformer(config, seed=0))
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    from_hf_state_dict(config, state)
    state["lm_head.weight"][3, 3] += 1

    with pytest.raises(OnstepError, match=r"lm_head.weight that differs"):
        from_hf_state_dict(config, state)
