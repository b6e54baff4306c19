"""Holds the objects of one call of a `Trainer`."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from onstep.data.loaders.collate import Collate
from onstep.events import Dispatcher
from onstep.record.kinds import Kind
from onstep.trainer.loss_convention import Labels
from onstep.trainer.model_step import ModelStep
from onstep.training import GlobalState
from onstep.training.protocols import UserOptimizer, UserScheduler

Resume = str | os.PathLike[str] | bool | None
"""A checkpoint, or whether to continue from the newest one."""


@dataclass
class Session:
    """The objects of one `train`, `evaluate` or `predict` call."""

    state: GlobalState
    module: nn.Module
    """The user's module."""
    model: list[nn.Module]
    """The chunks that the loop trains: the module, wrapped if there are several ranks, or its stages on this rank."""
    forward_step: ModelStep
    labels: Labels
    collate: Collate
    notify: Dispatcher
    optimizer: UserOptimizer | None = None
    scheduler: UserScheduler | None = None
    train_data: Any = None
    trains: bool = False
    build: Callable[[], None] | None = None
    """Builds what a training needs beside the model: the optimizer, the scheduler, the data."""
    ignore_keys: list[str] | None = None
    """The outputs that evaluations of a training do not keep as predictions."""
    compiled: ExitStack = field(default_factory=ExitStack)
    """Holds the compiled code of the model."""
    is_test: bool = False
    """Whether the evaluation in progress is a prediction, whose data may have no labels."""
    record_kind: Kind = "log"
    """What is being logged: a step, or an evaluation."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """The mean losses of the most recent evaluation."""
    parts: list[nn.Module] = field(default_factory=list)
    """What a session outside of training calls: the module, or its stages."""
    preparation_seconds: float = 0.0
    """How long it took to place the model."""

    def release(self) -> None:
        """End worker processes and release the data-parallel wrapper."""
        if self.train_data is not None:
            self.train_data.close()
        self.model = self.notify.model = self.parts
