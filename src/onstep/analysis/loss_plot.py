"""A picture of a run's training and validation loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from onstep.errors import DataError
from onstep.journal import Record, read_records

_TRAINING_COLOUR = "#1f6f9f"
_VALIDATION_COLOUR = "#d1602c"
_TEXT_COLOUR = "#333333"
_SMOOTHED_FROM = 40
"""Training points from which on a moving mean is drawn over the raw line."""
_SMOOTHING_SHARE = 25
"""The moving mean spans one in this many of the points."""

Points = tuple[list[int], list[float]]
"""Steps and losses."""


def plot_loss(journal_path: str | Path, output_path: str | Path) -> Path:
    """Draw training and validation loss over optimizer steps.

    Many training points get a centred moving mean over the raw line. Losses that are NaN or infinite leave a gap.

    Args:
        journal_path: A `trainer_logs.json`, also of a run that is going on or was killed.
        output_path: The picture; its suffix says the format (.png, .svg, .pdf). Its folder is made if needed.

    Returns:
        `output_path`.

    Raises:
        FileNotFoundError: when there is no such journal.
        JournalError: when the file is no journal.
        DataError: when the journal has no loss to draw.
    """
    output = Path(output_path)
    records = read_records(journal_path)
    training = _points([record for record in records if "eval_loss" not in record], "loss")
    validation = _points(records, "eval_loss")
    if not training[0] and not validation[0]:
        raise DataError(f"{journal_path} has no record with 'loss' or 'eval_loss'; log at least one step, then plot.")
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_training(axes, training)
    _draw_validation(axes, validation)
    _decorate(axes, Path(journal_path))
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
    return output


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Centred moving mean over `width` values (the next odd number), over fewer at the edges; NaN stays where it is."""
    array = np.asarray(values, dtype=float)
    is_finite = np.isfinite(array)
    sums = np.concatenate([[0.0], np.cumsum(np.where(is_finite, array, 0.0))])
    counts = np.concatenate([[0], np.cumsum(is_finite)])
    first = np.maximum(np.arange(len(array)) - width // 2, 0)
    end = np.minimum(np.arange(len(array)) + width // 2 + 1, len(array))
    means = (sums[end] - sums[first]) / np.maximum(counts[end] - counts[first], 1)
    return [float(mean) for mean in np.where(is_finite, means, np.nan)]


def _points(records: list[Record], key: str) -> Points:
    """Steps and values of the records that have `key`; what is not finite becomes NaN, which is drawn as a gap."""
    having = [record for record in records if isinstance(record.get(key), (int, float))]
    steps = [int(record.get("global_step", 0)) for record in having]
    return steps, [value if math.isfinite(value) else math.nan for value in (float(record[key]) for record in having)]


def _draw_training(axes: Axes, points: Points) -> None:
    steps, losses = points
    if not steps:
        return
    label = f"training{_last(losses)}"
    if len(steps) < _SMOOTHED_FROM:
        axes.plot(steps, losses, color=_TRAINING_COLOUR, linewidth=1.8, marker="o", markersize=3, label=label)
        return
    means = smoothed(losses, len(steps) // _SMOOTHING_SHARE)
    axes.plot(steps, losses, color=_TRAINING_COLOUR, linewidth=0.8, alpha=0.3)
    axes.plot(steps, means, color=_TRAINING_COLOUR, linewidth=1.8, label=label)


def _draw_validation(axes: Axes, points: Points) -> None:
    steps, losses = points
    if not steps:
        return
    marker_size = 6 if len(steps) < _SMOOTHED_FROM else 0
    axes.plot(
        steps,
        losses,
        color=_VALIDATION_COLOUR,
        linewidth=1.8,
        marker="o",
        markersize=marker_size,
        markeredgecolor="white",
        label=f"validation{_last(losses)}",
    )


def _last(losses: list[float]) -> str:
    """The last loss, for the legend."""
    finite = [loss for loss in losses if math.isfinite(loss)]
    return f"  (last {finite[-1]:.4f})" if finite else "  (not finite)"


def _decorate(axes: Axes, journal_path: Path) -> None:
    axes.set_title(f"Loss of {journal_path.resolve().parent.name}", loc="left", color=_TEXT_COLOUR, fontsize=13)
    axes.set_xlabel("step", color=_TEXT_COLOUR)
    axes.set_ylabel("loss", color=_TEXT_COLOUR)
    axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}")
    axes.tick_params(colors=_TEXT_COLOUR, length=0)
    axes.grid(color="#e3e3e3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
    axes.legend(frameon=False, labelcolor=_TEXT_COLOUR)
