"""Named configurations: a complete run each, to be changed by overrides."""

from __future__ import annotations

from collections.abc import Callable

from onstep.config import ConfigContainer
from onstep.config.part import nearest
from onstep.errors import ConfigError
from onstep.recipes.qwen import qwen25_500m_pretrain_config
from onstep.recipes.tiny_gpt import tiny_gpt_pretrain_config

RECIPES: dict[str, Callable[[], ConfigContainer]] = {
    "tiny_gpt": tiny_gpt_pretrain_config,
    "qwen25_500m": qwen25_500m_pretrain_config,
}
"""Every recipe by its name, which is also `config.run.recipe`."""

__all__ = ["RECIPES", "get_recipe", "qwen25_500m_pretrain_config", "tiny_gpt_pretrain_config"]


def get_recipe(name: str) -> Callable[[], ConfigContainer]:
    """The recipe of that name, or of that function name (`tiny_gpt_pretrain_config`).

    Raises:
        ConfigError: no such recipe; the message names the nearest one and all there are.
    """
    short = name.removesuffix("_pretrain_config")
    if short not in RECIPES:
        hint = nearest(short, list(RECIPES))
        raise ConfigError(f"there is no recipe {name!r}.{hint} Recipes: {', '.join(RECIPES)}.")
    return RECIPES[short]
