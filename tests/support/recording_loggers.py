"""Loggers in the place of the four trackers, which record what they get."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onstep.training import GlobalState


class RecordingLogger:
    """Takes the calls of a `SummaryWriter`, of W&B, and of MLflow and Comet."""

    def __init__(self) -> None:
        self.points: list[tuple[str, Any, int]] = []

    def add_scalar(self, tag: str, value: Any, step: int) -> None:
        self.points.append((tag, value, step))

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        self.points += [(tag, value, step) for tag, value in metrics.items()]

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        self.log(metrics, step)

    @property
    def tags(self) -> list[str]:
        """Every tag once."""
        return list(dict.fromkeys(tag for tag, _, _ in self.points))

    def curve(self, tag: str) -> dict[int, float]:
        """The points of a tag; a second one at the same place is a mistake."""
        found = [(step, float(value)) for name, value, step in self.points if name == tag]
        assert len(dict(found)) == len(found), found
        return dict(found)


def record_all(state: GlobalState) -> dict[str, RecordingLogger]:
    """Put recording loggers in the place of all four trackers."""
    loggers = {name: RecordingLogger() for name in ("tensorboard", "wandb", "mlflow", "comet")}
    state.tensorboard_logger, state.wandb_logger = loggers["tensorboard"], loggers["wandb"]
    state.mlflow_logger, state.comet_logger = loggers["mlflow"], loggers["comet"]
    return loggers
