"""Keeps a model in training mode where user code has set it to evaluation and left it there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onstep.events.context import unwrap


class TrainingModes:
    """The mode of each submodule, noted while the model trains, such as batch norms that the user keeps in evaluation.

    Args:
        model: the chunks of the model as the loop trains them, with their wrappers.
    """

    def __init__(self, model: Sequence[nn.Module]) -> None:
        self.module: nn.Module = unwrap(model[0])
        """The first chunk, whose mode is that of the others."""
        self.epoch: int | None = None
        """The epoch in which the modes were noted; None before the first."""
        self._model = model
        self._modes: dict[nn.Module, bool] = {}

    def keep(self, epoch: int | None) -> None:
        """Restore the noted modes if the user's module is in evaluation mode; note them for this epoch if it trains."""
        if not self.module.training:
            for module, was_training in self._modes.items():  # parents first, as `train` sets the modules below too
                if module.training is not was_training:
                    module.train(was_training)
        if self.module.training:
            self._modes = {module: module.training for chunk in self._model for module in chunk.modules()}
            self.epoch = epoch
