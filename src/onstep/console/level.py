"""Adds the callbacks that show as much of a run on the console as `logger.console` says."""

from __future__ import annotations

from typing import Literal, cast, get_args

from onstep.config import ConfigContainer
from onstep.config.suggestions import not_a_choice
from onstep.console.info import InfoCallback
from onstep.console.progress import ProgressCallback
from onstep.events import CallbackManager

Level = Literal["quiet", "default", "verbose", "bridge"]
"""The end of the run alone; rows and a summary; everything; or Megatron Bridge's lines."""


def shown_by_default(level: Level, *, use_tqdm: bool | None = None) -> list[ProgressCallback | InfoCallback]:
    """The console's default callbacks of `Trainer` and `onstep train`, where `DefaultMetrics` adds the speed.

    Args:
        level: how much is shown.
        use_tqdm: whether to show bars; see `ProgressCallback`.
    """
    if level == "bridge":
        return []
    progress = ProgressCallback(use_tqdm, level=level, expected=("tokens", "tok_per_sec"))
    return [progress] if level == "quiet" else [progress, InfoCallback(brief=level != "verbose")]


def level_of(config: ConfigContainer) -> Level:
    """What `logger.console` says.

    Args:
        config: the configuration of the run.

    Raises:
        ConfigError: for a level that does not exist.
    """
    level, levels = config.logger.console, get_args(Level)
    if level not in levels:
        raise not_a_choice("logger.console", level, levels)
    return cast(Level, level)


def with_progress(manager: CallbackManager | None, config: ConfigContainer) -> CallbackManager | None:
    """The callbacks of `pretrain`: a `ProgressCallback` is added unless one of them shows progress.

    None is added for Megatron Bridge's lines, nor with `run.default_callbacks=false`. A user's own manager is extended.

    Args:
        manager: the callbacks of the run, to which the console's are added.
        config: the configuration of the run.

    Raises:
        ConfigError: for a level that does not exist.
    """
    level = level_of(config)
    callbacks = manager.callbacks if manager is not None else []
    if any(getattr(callback, "shows_progress", False) for callback in callbacks):
        return manager
    if level == "bridge" or not config.run.default_callbacks:
        return manager
    manager = CallbackManager() if manager is None else manager
    manager.add(ProgressCallback(level=level))
    return manager
