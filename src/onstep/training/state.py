"""Megatron Bridge's import path of `GlobalState` and `TrainState`."""

from onstep.progress import TrainState
from onstep.training.bridge.global_state import GlobalState

__all__ = ["GlobalState", "TrainState"]
