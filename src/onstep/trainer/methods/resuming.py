"""Hugging Face's methods that load a checkpoint: of the run that is continued, or the best weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from onstep.checkpoint import ModelState, resolve
from onstep.checkpoint.loading import load_model
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import ConfigError, MissingWeightsError
from onstep.events.context import unwrap
from onstep.models.hf.weight_files import read_tensors
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.loads import Loads
from onstep.trainer.overrides import overrides

logger = logging.getLogger(__name__)

_WEIGHTS, _ADAPTER = "model*.safetensors", "adapter_model.safetensors"


class ResumingMethods(BaseTrainer):
    """Hugging Face's methods that load a checkpoint. A run without overrides of them loads it without calling them."""

    loads: Loads | None = None
    """What a run loads from its checkpoint, while it does so."""
    has_loaded_weights: bool = False
    """Whether `_load_from_checkpoint` has been called for the checkpoint that is about to be loaded."""

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Load the weights of a checkpoint into `model`, by default the Trainer's.

        An override is called when a run continues, before the optimizer is made, and when it is rolled back. It loads
        into the model that exists. For the checkpoint that the run continues from, this is collective.

        Raises:
            MissingWeightsError: if there are no weights.
        """
        target = self.model if model is None else model
        assert target is not None
        if self.loads is not None and self.loads.are_of(resume_from_checkpoint) and unwrap(target) is self.model:
            self.loads.load("model")
            result = _IncompatibleKeys([], [])
        else:
            result = load_weights(unwrap(target), Path(resume_from_checkpoint))
        if result.missing_keys or result.unexpected_keys or overrides(self, "_issue_warnings_after_load"):
            self._issue_warnings_after_load(result)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, at the end of a training with `load_best_model_at_end`. Collective.

        Raises:
            ConfigError: outside of that.
        """
        state = None if self.session is None else self.session.state
        if state is None or state.checkpoints is None:
            raise ConfigError("Trainer._load_best_model is called at the end of a training with saved checkpoints.")
        state.checkpoints.load_best_model(self.session.model)
        if overrides(self, "_issue_warnings_after_load"):
            self._issue_warnings_after_load(_IncompatibleKeys([], []))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from the checkpoint that the run continues from; None loads nothing. Collective."""
        if checkpoint is not None:
            self._continued(checkpoint, "_load_optimizer_and_scheduler").load("optimizer", "scheduler")

    def _load_scaler(self, checkpoint: str | None) -> None:
        """float16's loss scale is loaded with the optimizer: this loads nothing."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Load the random generators from the checkpoint that the run continues from; None loads nothing."""
        if checkpoint is not None:
            self._continued(checkpoint, "_load_rng_state").load("rng")

    def _load_callback_state(self) -> None:
        """Load the states of callbacks from the checkpoint that the run continues from."""
        if self.loads is None:
            raise ConfigError("Trainer._load_callback_state is called when a run continues from a checkpoint.")
        self.loads.load("callbacks")

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of names that the loaded weights lack, or have in excess."""
        missing, unexpected = list(load_result.missing_keys), list(load_result.unexpected_keys)
        left_out = getattr(self.model, "_keys_to_ignore_on_save", None)
        if missing and left_out and set(missing) == set(left_out):
            self.model.tie_weights()  # type: ignore[union-attr,operator]
        elif missing:
            logger.warning("the loaded weights have no %s, which keep their values", ", ".join(missing))
        if unexpected:
            logger.warning("the loaded weights have %s, which the model lacks", ", ".join(unexpected))

    def _continued(self, checkpoint: str, name: str) -> Loads:
        if self.loads is None or not self.loads.are_of(checkpoint):
            raise ConfigError(
                f"Trainer.{name}({os.fspath(checkpoint)!r}) loads from the checkpoint that the run continues from, "
                f"while it does so; to continue from another one, pass resume_from_checkpoint to train()."
            )
        return self.loads


def load_weights(model: nn.Module, directory: Path) -> Any:
    """Load the weights of a checkpoint, or of a directory of Hugging Face's; returns what did not match.

    Raises:
        MissingWeightsError: if there are none in safetensors.
    """
    if (directory / MANIFEST).is_file():
        load_model(resolve(directory), ModelState([model]))
        return _IncompatibleKeys([], [])
    if (directory / _ADAPTER).is_file() and hasattr(model, "load_adapter"):
        active = model.active_adapters[0]  # type: ignore[index]
        model.load_adapter(str(directory), active, is_trainable=True)  # type: ignore[operator]
        return _IncompatibleKeys([], [])
    files = sorted(directory.glob(_WEIGHTS))
    if not files:
        raise MissingWeightsError(
            f"{directory} has no weights in safetensors (model.safetensors); save the model with save_pretrained."
        )
    return model.load_state_dict(read_tensors(files), strict=False)
