"""The recipes build and are valid, on one rank and on several, and are the published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from onstep.config import (
    ConfigContainer,
    TokenizerConfig,
    apply_overrides,
    dump_yaml,
    from_dict,
    parse_yaml,
    resolve,
    validate,
)
from onstep.errors import ConfigError
from onstep.metrics import ModelShape
from onstep.metrics.model_shape import num_active_parameters
from onstep.models import Transformer, hf_config_dict
from onstep.recipes import (
    RECIPES,
    get_recipe,
    qwen25_500m_finetune_config,
    qwen25_500m_pretrain_config,
    summary,
    tiny_gpt_pretrain_config,
)


def qwen25(
    parameters: int, width: int, ffn: int, layers: int, heads: int, groups: int, vocabulary: int = 151_936
) -> tuple[int, str, dict[str, Any]]:
    """A dense Qwen2.5; all but those with more rows in their vocabulary have tied embeddings."""
    sizes = {"hidden_size": width, "intermediate_size": ffn, "num_hidden_layers": layers}
    attention = {"num_attention_heads": heads, "num_key_value_heads": groups}
    vocabularies = {"vocab_size": vocabulary, "tie_word_embeddings": vocabulary == 151_936}
    return parameters, "Qwen2", {**QWEN, **sizes, **attention, **vocabularies}


def llama31(width: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    """The settings of a Llama 3.1."""
    return {
        "vocab_size": 128_256,
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    }


QWEN = {"rms_norm_eps": 1e-6, "rope_theta": 1e6}
PUBLISHED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt2_124m": (124_439_808, "GPT2", {}),  # GPT2Config's defaults are that model
    "qwen25_500m": qwen25(494_032_768, 896, 4864, layers=24, heads=14, groups=2),
    "qwen25_1p5b": qwen25(1_543_714_304, 1536, 8960, layers=28, heads=12, groups=2),
    "qwen25_3b": qwen25(3_085_938_688, 2048, 11008, layers=36, heads=16, groups=2),
    "qwen25_7b": qwen25(7_615_616_512, 3584, 18944, layers=28, heads=28, groups=4, vocabulary=152_064),
    "qwen25_14b": (
        14_770_033_664,
        "Qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
    ),
    "llama31_8b": (8_030_261_248, "Llama", llama31(4096, 14336, layers=32, heads=32)),
    "llama31_70b": (70_553_706_496, "Llama", llama31(8192, 28672, layers=80, heads=64)),
    "llama32_1b": (
        1_235_814_400,
        "Llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_30b_a3b": (
        30_532_122_624,
        "Qwen3Moe",
        {
            **QWEN,
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "tie_word_embeddings": False,
        },
    ),
}
"""Parameters, architecture and settings of `transformers`, as each model's config.json has them."""

SAME_IN_BOTH = (
    *[
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    ],
    *["moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob", "head_dim", "rms_norm_eps"],
    *[
        "rope_parameters",
        "tie_word_embeddings",
        "hidden_act",
        "attention_bias",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "n_positions",
    ],
    *["activation_function", "layer_norm_epsilon"],
)


def filled(name: str) -> ConfigContainer:
    """The recipe, with the weights and the data that its forms for fine-tuning leave to the user."""
    config = get_recipe(name)()
    if "_finetune" in name:
        config.checkpoint.pretrained_checkpoint, config.dataset.paths = "weights", ["chat.jsonl"]
    return config


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_valid_and_comes_back_from_its_yaml(name: str) -> None:
    config = filled(name)
    for world_size in (1, 2, 4, 8):
        validate(config, world_size)
    assert config.run.recipe == name
    config = get_recipe(name)()
    assert from_dict(parse_yaml(dump_yaml(config))) == config


def test_a_recipe_is_built_anew_each_time() -> None:
    for name in RECIPES:
        first, second = get_recipe(name)(), get_recipe(name)()
        first.dataset.paths.append("x")
        first.train.train_iters = 1
        assert second == get_recipe(name)(), name


def test_a_recipe_says_in_a_sentence_what_it_is() -> None:
    for name in RECIPES:
        assert summary(name).endswith("."), name
        assert summary(name).endswith("(LoRA).") == name.endswith("_lora"), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_has_the_parameters_of_the_published_model(name: str) -> None:
    published, architecture, settings = PUBLISHED[name]
    their_config = getattr(transformers, f"{architecture}Config")(**settings)
    with torch.device("meta"):
        ours = Transformer(get_recipe(name)().model)
        model_class = {"GPT2": "GPT2LMHeadModel"}.get(architecture, f"{architecture}ForCausalLM")
        theirs = getattr(transformers, model_class)(their_config)
    assert ours.num_parameters() == published
    assert theirs.num_parameters() == published


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_recipe_is_the_published_model_to_transformers(name: str) -> None:
    _, architecture, settings = PUBLISHED[name]
    theirs = getattr(transformers, f"{architecture}Config")(**settings).to_dict()
    ours = getattr(transformers, f"{architecture}Config")(**hf_config_dict(get_recipe(name)().model)).to_dict()
    compared = [key for key in SAME_IN_BOTH if key in theirs]
    assert len(compared) >= 7
    if architecture == "GPT2":
        theirs["n_inner"] = 3072  # what None means there
    assert {key: ours[key] for key in compared} == {key: theirs[key] for key in compared}


def test_a_token_meets_3_billion_parameters_of_qwen3_30b_a3b() -> None:
    shape = ModelShape.of(get_recipe("qwen3_30b_a3b")().model)
    assert shape is not None
    assert num_active_parameters(shape) == 3_353_032_704


def test_tiny_gpt_is_the_same_run_on_any_number_of_ranks() -> None:
    config = tiny_gpt_pretrain_config()
    runs = [resolve(config, ranks).train for ranks in (1, 2, 4)]
    assert {run.global_batch_size for run in runs} == {8}
    assert [run.micro_batch_size for run in runs] == [8, 4, 2]


def test_tiny_moe_is_a_qwen3_moe_to_transformers() -> None:
    model = get_recipe("tiny_moe")().model
    model.vocab_size = 257
    assert hf_config_dict(model)["model_type"] == "qwen3_moe"


def test_a_form_for_fine_tuning_trains_the_same_model_more_gently() -> None:
    pretrain, full, lora = (get_recipe(f"qwen25_500m{form}")() for form in ("", "_finetune", "_finetune_lora"))
    assert full.model == pretrain.model == lora.model
    assert (full.peft.peft_scheme, lora.peft.peft_scheme) == (None, "lora")
    assert full.checkpoint.finetune
    assert full.dataset.kind == "chat"
    assert full.optimizer.lr is not None
    assert lora.optimizer.lr is not None
    assert pretrain.optimizer.lr is not None
    assert full.optimizer.lr < lora.optimizer.lr < pretrain.optimizer.lr
    assert lora == qwen25_500m_finetune_config(peft="lora")


def test_the_demo_learns_its_tokenizer_and_its_fine_tuning_takes_it_from_the_weights() -> None:
    pretrain, full = get_recipe("demo")(), get_recipe("demo_finetune")()
    assert (pretrain.tokenizer.tokenizer_type, pretrain.tokenizer.vocab_size) == ("bpe", 2048)
    assert full.tokenizer == TokenizerConfig()


def test_a_form_for_fine_tuning_needs_weights() -> None:
    config = get_recipe("tiny_gpt_finetune")()
    config.dataset.paths = ["chat.jsonl"]
    with pytest.raises(ConfigError, match=r"checkpoint.finetune=True requires weights .*pretrained_checkpoint"):
        validate(config)


def test_another_kind_of_fine_tuning_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"peft='Lora' must be None \| lora. Did you mean 'lora'"):
        qwen25_500m_finetune_config(peft="Lora")


def test_qwen_shrinks_by_overrides() -> None:
    config = qwen25_500m_pretrain_config()
    apply_overrides(
        config,
        [
            "model.num_layers=2",
            "model.hidden_size=64",
            "model.ffn_hidden_size=128",
            "model.num_attention_heads=4",
            "model.kv_channels=16",
            "model.vocab_size=300",
            "model.seq_length=32",
            "dataset.seq_length=32",
            "train.train_iters=10",
            "train.global_batch_size=4",
            "scheduler.lr_warmup_iters=2",
        ],
    )
    resolved = resolve(config, world_size=2)
    assert (resolved.model.num_layers, resolved.model.add_qkv_bias, resolved.train.micro_batch_size) == (2, True, 1)


@pytest.mark.parametrize("name", ["tiny_gpt_pretrain_config", "qwen25_7b_finetune_config"])
def test_recipes_are_found_by_function_name_too(name: str) -> None:
    assert get_recipe(name)().run.recipe == name.removesuffix("_config").removesuffix("_pretrain")


def test_a_mistyped_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown recipe 'tiny-gpt'. Did you mean 'tiny_gpt'"):
        get_recipe("tiny-gpt")
