"""Provides named configurations, each of a complete run that can be adapted by overrides.

In fine-tuning recipes, `peft=None` trains all weights of the model, `peft="lora"` a small number of added ones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from onstep.config import ConfigContainer
from onstep.config.suggestions import nearest, shown
from onstep.errors import ConfigError
from onstep.recipes.llama31 import (
    llama31_8b_finetune_config,
    llama31_8b_pretrain_config,
    llama31_70b_finetune_config,
    llama31_70b_pretrain_config,
)
from onstep.recipes.published import (
    any_finetune_config,
    any_pretrain_config,
    gpt2_124m_finetune_config,
    gpt2_124m_pretrain_config,
    llama32_1b_finetune_config,
    llama32_1b_pretrain_config,
)
from onstep.recipes.qwen import (
    qwen3_30b_a3b_finetune_config,
    qwen3_30b_a3b_pretrain_config,
    qwen25_1p5b_finetune_config,
    qwen25_1p5b_pretrain_config,
    qwen25_3b_finetune_config,
    qwen25_3b_pretrain_config,
    qwen25_7b_finetune_config,
    qwen25_7b_pretrain_config,
    qwen25_14b_finetune_config,
    qwen25_14b_pretrain_config,
    qwen25_500m_finetune_config,
    qwen25_500m_pretrain_config,
)
from onstep.recipes.tiny import (
    demo_finetune_config,
    demo_pretrain_config,
    tiny_gpt_finetune_config,
    tiny_gpt_pretrain_config,
    tiny_moe_finetune_config,
    tiny_moe_pretrain_config,
)

Recipe = Callable[[], ConfigContainer]

_PRETRAIN: dict[str, Recipe] = {
    "demo": demo_pretrain_config,
    "tiny_gpt": tiny_gpt_pretrain_config,
    "tiny_moe": tiny_moe_pretrain_config,
    "gpt2_124m": gpt2_124m_pretrain_config,
    "qwen25_500m": qwen25_500m_pretrain_config,
    "qwen25_1p5b": qwen25_1p5b_pretrain_config,
    "qwen25_3b": qwen25_3b_pretrain_config,
    "qwen25_7b": qwen25_7b_pretrain_config,
    "qwen25_14b": qwen25_14b_pretrain_config,
    "llama32_1b": llama32_1b_pretrain_config,
    "llama31_8b": llama31_8b_pretrain_config,
    "llama31_70b": llama31_70b_pretrain_config,
    "qwen3_30b_a3b": qwen3_30b_a3b_pretrain_config,
    "any": any_pretrain_config,
}

_FINETUNE: dict[str, Callable[..., ConfigContainer]] = {
    "any": any_finetune_config,
    "demo": demo_finetune_config,
    "tiny_gpt": tiny_gpt_finetune_config,
    "tiny_moe": tiny_moe_finetune_config,
    "gpt2_124m": gpt2_124m_finetune_config,
    "qwen25_500m": qwen25_500m_finetune_config,
    "qwen25_1p5b": qwen25_1p5b_finetune_config,
    "qwen25_3b": qwen25_3b_finetune_config,
    "qwen25_7b": qwen25_7b_finetune_config,
    "qwen25_14b": qwen25_14b_finetune_config,
    "llama32_1b": llama32_1b_finetune_config,
    "llama31_8b": llama31_8b_finetune_config,
    "llama31_70b": llama31_70b_finetune_config,
    "qwen3_30b_a3b": qwen3_30b_a3b_finetune_config,
}

RECIPES: dict[str, Recipe] = {
    **_PRETRAIN,
    **{f"{name}_finetune": recipe for name, recipe in _FINETUNE.items()},
    **{f"{name}_finetune_lora": partial(recipe, peft="lora") for name, recipe in _FINETUNE.items()},
}
"""All recipes by name, which is also `config.run.recipe`: training from scratch first, then the fine-tuning variants
`_finetune` and `_finetune_lora`."""

__all__ = [
    "RECIPES",
    "Recipe",
    "any_finetune_config",
    "any_pretrain_config",
    "demo_finetune_config",
    "demo_pretrain_config",
    "get_recipe",
    "gpt2_124m_finetune_config",
    "gpt2_124m_pretrain_config",
    "llama32_1b_finetune_config",
    "llama32_1b_pretrain_config",
    "qwen25_1p5b_finetune_config",
    "qwen25_1p5b_pretrain_config",
    "qwen25_3b_finetune_config",
    "qwen25_3b_pretrain_config",
    "qwen25_500m_finetune_config",
    "qwen25_500m_pretrain_config",
    "qwen25_7b_finetune_config",
    "qwen25_7b_pretrain_config",
    "qwen25_14b_finetune_config",
    "qwen25_14b_pretrain_config",
    "llama31_8b_finetune_config",
    "llama31_8b_pretrain_config",
    "llama31_70b_finetune_config",
    "llama31_70b_pretrain_config",
    "qwen3_30b_a3b_finetune_config",
    "qwen3_30b_a3b_pretrain_config",
    "summary",
    "tiny_gpt_finetune_config",
    "tiny_gpt_pretrain_config",
    "tiny_moe_finetune_config",
    "tiny_moe_pretrain_config",
]


def get_recipe(name: str) -> Recipe:
    """The recipe with that name or function name (`tiny_gpt_pretrain_config`).

    Args:
        name: the name of the recipe, or of its function.

    Raises:
        ConfigError: if there is no such recipe; the message names the closest match and all recipes.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a recipe is named by text such as tiny_gpt, got {shown(name)}; correct or drop it.")
    short = name.removesuffix("_pretrain_config").removesuffix("_config")
    if short not in RECIPES:
        hint = nearest(short, list(RECIPES), cutoff=0.6)
        raise ConfigError(
            f"unknown recipe {shown(name)}.{hint} Recipes: {', '.join(_PRETRAIN)}; each also with _finetune and "
            f"_finetune_lora, and any_finetune for any model."
        )
    return RECIPES[short]


def summary(name: str) -> str:
    """A one-sentence description of a recipe: the first line of its docstring.

    Args:
        name: the name of the recipe, or of its function.
    """
    recipe: Any = get_recipe(name)
    text = str(getattr(recipe, "func", recipe).__doc__ or "").strip().partition("\n")[0]
    return text if recipe.__class__ is not partial else f"{text.rstrip('.')} (LoRA)."
