"""Saves the weights that an optimizer trains and that are not the model's, such as those of a loss."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from onstep.errors import CheckpointError
from onstep.events import Callback
from onstep.training.protocols import StateDict


class Session(Protocol):
    """The part of a training's session that is used here."""

    model: list[nn.Module]
    optimizer: torch.optim.Optimizer


class OtherWeights(Callback):
    """The weights of the optimizer that are not the model's, in the order of its groups. Each rank saves them."""

    state_key = "other_weights"

    def __init__(self, session: Session) -> None:
        self._session = session

    def weights(self) -> list[nn.Parameter]:
        """The weights; none in most trainings."""
        of_model = {param for module in self._session.model for param in module.parameters()}
        groups = getattr(self._session.optimizer, "param_groups", [])
        return [param for group in groups for param in group["params"] if param not in of_model]

    def state_dict(self) -> StateDict:
        """The weights by number."""
        return {str(number): one.detach() for number, one in enumerate(self.weights())}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set the weights.

        Raises:
            CheckpointError: if the checkpoint has others.
        """
        weights = self.weights()
        saved = [state_dict[str(number)] for number in range(len(state_dict))]
        if [one.shape for one in saved] != [one.shape for one in weights]:
            raise CheckpointError(
                f"the checkpoint has {len(saved)} weights that are not the model's, of shapes "
                f"{[tuple(one.shape) for one in saved]}, the optimizer {len(weights)}, of shapes "
                f"{[tuple(one.shape) for one in weights]}; continue with the loss of the run."
            )
        with torch.no_grad():
            for one, value in zip(weights, saved, strict=True):
                one.copy_(value)
