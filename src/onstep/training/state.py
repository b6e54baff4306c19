"""Megatron Bridge's import path of `GlobalState` and `TrainState`."""

from onstep.train_state import TrainState
from onstep.training.bridge.global_state import GlobalState

__all__ = ["GlobalState", "TrainState"]
