"""How far a run is: the one home of progress, read by both doors and saved with every checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TrainState:
    """Counters of a run. ``transformers``' ``TrainerState`` is a view of it (`onstep.events.TrainerState`).

    The data position is ``(epoch, samples_in_epoch)``; everything that a user may change while the run goes on
    (learning-rate factor, intervals, limits) is in ``overrides``.
    """

    step: int = 0
    """Optimizer steps completed."""
    epoch: int = 0
    """Passes over the training data completed."""
    samples_in_epoch: int = 0
    """Samples taken in the current epoch, over all ranks."""
    steps_in_epoch: int = 0
    """Optimizer steps completed in the current epoch."""
    consumed_train_samples: int = 0
    skipped_train_samples: int = 0
    consumed_valid_samples: int = 0
    consumed_tokens: int = 0
    """Tokens with a label trained on, over all ranks; brought up to date at every logged step."""
    floating_point_operations_so_far: float = 0.0
    best_metric: float | None = None
    """Best value of `validation.metric_for_best_model` so far, and the step where it was met."""
    best_step: int | None = None
    do_train: bool = False
    do_valid: bool = False
    do_test: bool = False
    overrides: dict[str, Any] = field(default_factory=dict)
