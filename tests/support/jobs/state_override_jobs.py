"""Trainings of `tests.support.state_overrides` on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support import state_overrides
from tests.support.state_overrides import losses, trained, weights


def job_trains(settings: dict[str, Any]) -> Any:
    """Train in the working directory, and continue what is there; the weights and the losses."""
    cls = getattr(state_overrides, settings["name"])
    trainer = trained(cls, Path("runs"), settings["kill_at"], num_train_epochs=3)
    return [weights(trainer), losses(trainer)]
