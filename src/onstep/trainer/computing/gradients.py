"""The parts of `trainer.accelerator` that concern gradients: float16's loss scale, and where a step is."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onstep.optim import LossScaler
from onstep.trainer.computing.refused_attributes import OF_A_STEP


class ScaledLoss:
    """float16's loss scale with the methods of torch's `GradScaler` that a training step uses."""

    def __init__(self, scaler: LossScaler) -> None:
        self._scaler = scaler

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale."""
        return loss * self._scaler.scale

    def get_scale(self) -> float:
        """The scale."""
        return self._scaler.scale

    def is_enabled(self) -> bool:
        """True."""
        return True


class GradientState:
    """Where a step is, under the names of accelerate's `GradientState`.

    Args:
        accelerator: the Trainer's.
    """

    num_steps = 1
    """1, as under Hugging Face's Trainer, which accumulates gradients itself."""
    adjust_scheduler = False
    sync_with_dataloader = True

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.plugin_kwargs: dict[str, object] = {"num_steps": 1}

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch is the last of its step."""
        return bool(self._accelerator.sync_gradients)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer.accelerator.gradient_state is Onstep's and has no {name!r}; {OF_A_STEP}.")
