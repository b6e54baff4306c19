"""Saves the weights that an optimizer trains and that are not the model's, such as those of a loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from onstep.distributed.shards import model_parameter
from onstep.errors import CheckpointError
from onstep.optim import TrainingOptimizer
from onstep.train_state import StateDict


def other_weights(model: Sequence[nn.Module], optimizer: object) -> list[nn.Parameter]:
    """The weights of an optimizer that are not the model's, in the order of its groups; none in most trainings."""
    if not isinstance(optimizer, TrainingOptimizer):  # others may have copies of the model's, which they save
        return []
    of_model = {param for module in model for param in module.parameters()}
    return [
        param for group in optimizer.param_groups for param in group["params"] if model_parameter(param) not in of_model
    ]


class OtherWeights:
    """The state of such weights, which have no names. Ranks average the gradients of the model only, so each saves its
    own.
    """

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights

    def state_dict(self) -> StateDict:
        """The weights by number."""
        return {str(number): one.detach() for number, one in enumerate(self._weights)}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set the weights.

        Raises:
            CheckpointError: if the checkpoint has others.
        """
        saved = [state_dict[str(number)] for number in range(len(state_dict))]
        if [one.shape for one in saved] != [one.shape for one in self._weights]:
            raise CheckpointError(
                f"the checkpoint has {len(saved)} weights that are not the model's, of shapes "
                f"{[tuple(one.shape) for one in saved]}, the optimizer {len(self._weights)}, of shapes "
                f"{[tuple(one.shape) for one in self._weights]}; continue with the loss of the run."
            )
        with torch.no_grad():
            for one, value in zip(self._weights, saved, strict=True):
                one.copy_(value)
