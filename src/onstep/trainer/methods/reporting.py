"""Hugging Face's methods that log and print, and those that tell the ranks apart."""

from __future__ import annotations

from typing import Any

from onstep.errors import ConfigError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.training.bridge.global_state import GlobalState
from onstep.training.stages.record import publish


class ReportingMethods(BaseTrainer):
    """Hugging Face's methods that log and print, and those that tell the ranks apart."""

    def log(self, logs: dict[str, Any]) -> None:
        """Add your own record to the log, for example from `compute_loss`, and fire `on_log`.

        Raises:
            ConfigError: outside of a run.
        """
        if self.session is None:
            raise ConfigError("Trainer.log requires a run; call it during training or evaluation.")
        state: GlobalState = self.session.state
        publish(state, {"epoch": state.trainer_state.epoch, **logs}, self.session.notify)
