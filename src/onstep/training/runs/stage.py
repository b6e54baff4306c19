"""Defines `RunStage`, how far this process has come within the run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RunStage:
    """The progress of this process within the run."""

    is_resumed: bool = False
    """Whether this process continues from a checkpoint."""
    is_chosen_start: bool = False
    """The user chose the checkpoint, so `load_optim` and `load_rng` determine how much of it is loaded."""
    has_stepped: bool = False
    """Whether this process has completed a step."""
    has_checked_gradients: bool = False
    """Whether parameters without a gradient have been looked for."""
    epoch_is_open: bool = False
    """True between `on_epoch_start` and `on_epoch_end`."""
    data_exhausted: bool = False
    final_metrics_logged: bool = False
    """Whether the final metrics of the training are logged."""
    section_limits: dict[str, float] = field(default_factory=dict)
    """Learned time limits without progress, in seconds, by the timed section of the run."""
