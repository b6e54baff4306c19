"""Fits a recipe's final learning rate to a peak that the user has lowered."""

from __future__ import annotations

from collections.abc import Collection

from onstep.config.container import ConfigContainer

MIN_LR = "optimizer.min_lr"


def fit_min_lr(config: ConfigContainer, recipe: ConfigContainer, given: Collection[str]) -> str | None:
    """Scale, in place, the recipe's final learning rate if it is above the peak: it keeps its share of the peak.

    Args:
        config: the configuration; it is based on the recipe.
        recipe: the recipe's own values.
        given: keys that the user has set, which are never changed.

    Returns:
        What was changed, in a line; None if nothing was.
    """
    lr, min_lr = config.optimizer.lr, config.optimizer.min_lr
    peak, lowest = recipe.optimizer.lr, recipe.optimizer.min_lr
    if MIN_LR in given or not lowest or min_lr != lowest or not peak or lr is None or not 0 <= lr < lowest:
        return None
    config.optimizer.min_lr = float(f"{lr * lowest / peak:.6g}")  # 1e-06, not 1.0000000000002e-06
    return (
        f"{MIN_LR}={config.optimizer.min_lr} (not {lowest:g}), the recipe's share of optimizer.lr={lr}; set it to "
        f"choose another"
    )
