"""What the functions that plot curves take in common."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from onstep.analysis.series import check_x_axis
from onstep.errors import ConfigError


@dataclass(frozen=True)
class PlotOptions:
    """How curves are drawn; the same for every axes of a figure."""

    x_axis: str = "step"
    smooth_window: int | None = None
    log_scale: bool = False
    output_path: str | Path | None = None
    figsize: tuple[float, float] = (12, 8)
    show: bool = False
    title: str | None = None
    ignore_outliers: bool = True
    perplexity: bool = False
    x_min: float | None = None
    x_max: float | None = None
    y_min: float | None = None
    y_max: float | None = None

    def __post_init__(self) -> None:
        check_x_axis(self.x_axis)
        if self.smooth_window is not None and self.smooth_window < 1:
            raise ConfigError(f"smooth_window must be at least 1 (no smoothing), got {self.smooth_window}.")
        check_range("x", self.x_min, self.x_max)
        check_range("y", self.y_min, self.y_max)
        check_figsize(self.figsize)
        for name, bound in (("y_min", self.y_min), ("y_max", self.y_max)):
            if self.log_scale and bound is not None and bound <= 0:
                raise ConfigError(f"{name} must be > 0 on a logarithmic axis, got {bound:g}.")


def check_range(name: str, low: float | None, high: float | None) -> None:
    """Refuse bounds that show nothing.

    Raises:
        ConfigError: naming both.
    """
    for bound in (low, high):
        if bound is not None and not math.isfinite(bound):
            raise ConfigError(f"{name}_min and {name}_max must be finite, got {bound}.")
    if low is not None and high is not None and not low < high:
        raise ConfigError(f"{name}_min must be below {name}_max, got {low:g} and {high:g}.")


def check_figsize(figsize: tuple[float, float]) -> None:
    """Refuse a size in inches that no picture can have.

    Raises:
        ConfigError: naming it.
    """
    if len(figsize) != 2 or not all(0.5 <= side <= 200 for side in figsize):
        raise ConfigError(f"figsize must be width and height in inches, each from 0.5 to 200, got {figsize}.")
