"""Holds what a run loads from a checkpoint, for the methods of its Trainer that load a part of it each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onstep.checkpoint import CheckpointInfo, StateComponent
from onstep.errors import ConfigError
from onstep.trainer.overrides import overrides
from onstep.training.checkpointing.writing import weights_of
from onstep.training.protocols import Checkpoints

Load = Callable[[CheckpointInfo, Sequence[StateComponent]], None]


@dataclass(frozen=True)
class Loads:
    """The parts of a checkpoint that a run loads, while it does so."""

    info: CheckpointInfo
    """The checkpoint."""
    components: Sequence[StateComponent]
    """What is to be loaded now."""
    load_components: Load
    """Loads some of them. Collective."""

    def are_of(self, path: str | os.PathLike[str]) -> bool:
        """Whether it is this checkpoint."""
        return Path(path).resolve() == self.info.path.resolve()

    def load(self, *keys: str) -> None:
        """Load the components with these keys, as far as they are to be loaded now. Collective."""
        chosen = [one for one in self.components if one.key in keys]
        if chosen:
            self.load_components(self.info, chosen)


LOADERS: dict[str, tuple[str, ...]] = {
    "_load_from_checkpoint": ("model",),
    "_load_callback_state": ("callbacks",),
    "_load_optimizer_and_scheduler": ("optimizer", "scheduler"),
    "_load_scaler": (),
    "_load_rng_state": ("rng",),
}
"""The methods that load a part of a checkpoint, in the order of their calls, with the components that they load."""


def by_methods(trainer: Any, load: Load) -> Load:
    """`load` through those methods of a Trainer that the user overrides; the others' parts are loaded directly.

    What an override does not load by `super()` is as the override leaves it.
    """
    names = [name for name in LOADERS if _is_called(trainer, name)]
    if not names:
        return load

    def load_by_methods(info: CheckpointInfo, components: Sequence[StateComponent]) -> None:
        path, keys = str(info.path), {one.key for one in components}
        taken = {key for name in names for key in LOADERS[name]}
        trainer.loads = Loads(info, components, load)
        try:
            if "model" in taken & keys and not trainer.has_loaded_weights:
                trainer._load_from_checkpoint(path)
            trainer.has_loaded_weights = False
            others = [one for one in components if one.key not in taken]
            if others:
                load(info, others)
            if "callbacks" in taken & keys:
                trainer._load_callback_state()
            if "_load_optimizer_and_scheduler" in names and {"optimizer", "scheduler"} & keys:
                trainer._load_optimizer_and_scheduler(path)
            if "_load_scaler" in names and "optimizer" in keys:
                trainer._load_scaler(path)
            if "rng" in taken & keys:
                trainer._load_rng_state(path)
        finally:
            trainer.loads = None

    return load_by_methods


def _is_called(trainer: Any, name: str) -> bool:
    warns = name == "_load_from_checkpoint" and overrides(trainer, "_issue_warnings_after_load")
    return warns or overrides(trainer, name)


def load_weights_first(trainer: Any, checkpoints: Checkpoints | None) -> None:
    """Load the weights of a run that continues through an overridden `_load_from_checkpoint`. Collective.

    Raises:
        ConfigError: if it replaces the model in place of loading into it.
    """
    if checkpoints is None or checkpoints.start is None or not _is_called(trainer, "_load_from_checkpoint"):
        return
    model = trainer.model
    trainer.loads = Loads(checkpoints.start, [weights_of([model], trainer.global_state.world)], checkpoints.read)
    try:
        trainer._load_from_checkpoint(str(checkpoints.start.path))
    finally:
        trainer.loads = None
    if trainer.model is not model:
        raise ConfigError(
            f"{type(trainer).__name__}._load_from_checkpoint replaced trainer.model by a "
            f"{type(trainer.model).__name__}; load the weights into the model itself: self.model.load_state_dict(...)."
        )
    trainer.has_loaded_weights = True
