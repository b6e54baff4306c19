"""A user's own torch scheduler behind the step protocol of the loop."""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from onstep.errors import ConfigError


class TorchSchedulerAdapter:
    """Steps a torch `LRScheduler` once after each applied update; its state passes through as it is.

    Raises:
        ConfigError: the scheduler waits for a metric, which an optimizer step does not have.
    """

    def __init__(self, torch_scheduler: LRScheduler) -> None:
        if isinstance(torch_scheduler, ReduceLROnPlateau):
            raise ConfigError(
                "ReduceLROnPlateau must be stepped with a metric, and an optimizer step has none; "
                "step it in a callback after evaluation and pass no scheduler"
            )
        self.torch_scheduler = torch_scheduler
        self.num_steps = 0
        """Samples trained on since this adapter was made."""

    def step(self, increment: int) -> None:
        """Step the torch scheduler once, however many samples the step had."""
        self.num_steps += increment
        self.torch_scheduler.step()

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """The learning rate that the torch scheduler wrote into `param_group`."""
        return float(param_group["lr"])

    def state_dict(self) -> dict[str, Any]:
        """The torch scheduler's own state."""
        return self.torch_scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand `state_dict` to the torch scheduler."""
        self.torch_scheduler.load_state_dict(state_dict)
