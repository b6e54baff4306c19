"""The recipes build and are valid, on one rank and on several."""

from __future__ import annotations

import pytest

from onstep.config import apply_overrides, resolve, validate
from onstep.errors import ConfigError
from onstep.recipes import RECIPES, get_recipe, qwen25_500m_pretrain_config, tiny_gpt_pretrain_config


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_recipe_is_valid_and_knows_its_name(name: str, world_size: int) -> None:
    config = get_recipe(name)()
    validate(config, world_size)
    assert config.run.recipe == name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_built_anew_each_time(name: str) -> None:
    first, second = get_recipe(name)(), get_recipe(name)()
    first.dataset.paths.append("x")
    first.train.train_iters = 1
    assert second == get_recipe(name)()


def test_tiny_gpt_is_the_same_run_on_any_number_of_ranks() -> None:
    config = tiny_gpt_pretrain_config()
    runs = [resolve(config, ranks).train for ranks in (1, 2, 4)]
    assert {run.global_batch_size for run in runs} == {8}
    assert [run.micro_batch_size for run in runs] == [8, 4, 2]


def test_qwen_has_the_published_sizes() -> None:
    model = resolve(qwen25_500m_pretrain_config()).model
    embedding = model.vocab_size * model.hidden_size  # type: ignore[operator]
    queries = model.num_attention_heads * model.kv_channels  # type: ignore[operator]
    keys = model.num_query_groups * model.kv_channels  # type: ignore[operator]
    attention = model.hidden_size * (2 * queries + 2 * keys) + queries + 2 * keys
    mlp = 3 * model.hidden_size * model.ffn_hidden_size  # type: ignore[operator]
    norms = 2 * model.hidden_size
    total = embedding + model.num_layers * (attention + mlp + norms) + model.hidden_size
    assert total == 494_032_768  # parameters of the published checkpoint, embeddings tied


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


def test_recipes_are_found_by_function_name_too() -> None:
    assert get_recipe("tiny_gpt_pretrain_config") is tiny_gpt_pretrain_config


def test_a_mistyped_recipe_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'tiny-gpt'. Did you mean 'tiny_gpt'"):
        get_recipe("tiny-gpt")
