"""A picture of a run's training and validation loss."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from onstep.analysis.plots import LOSS_LOOKS, draw_together
from onstep.analysis.plots_axes import add_legend
from onstep.analysis.plots_options import PlotOptions
from onstep.analysis.plots_output import new_figure, save
from onstep.analysis.plots_style import FONT_SIZE, TEXT_COLOUR, TITLE_SIZE, plain
from onstep.analysis.series import Curve, curves
from onstep.analysis.training_log import TrainingLog
from onstep.errors import DataError


def plot_loss(journal_path: str | Path, output_path: str | Path) -> Path:
    """Draw training and validation loss over optimizer steps, as `onstep train` does when it is done.

    Many training points get a centred moving mean over the raw line. Losses that are NaN or infinite leave a gap.
    `plot_loss_curves` draws more, and takes options.

    Args:
        journal_path: A `trainer_logs.json`, also of a run that is going on or was killed.
        output_path: The picture; its suffix says the format (.png, .svg, .pdf). Its folder is made if needed.

    Returns:
        `output_path`.

    Raises:
        FileNotFoundError: when there is no such journal.
        DataError: when the file is no journal, or has no loss to draw.
    """
    log = TrainingLog.from_file(journal_path)
    options = PlotOptions(ignore_outliers=False)
    found = {metric: row[0] for metric, row in zip(LOSS_LOOKS, curves([log], list(LOSS_LOOKS), "step"), strict=True)}
    if not any(map(len, found.values())):
        raise DataError(f"{journal_path} has no record with 'loss' or 'eval_loss'; log at least one step, then plot.")
    figure = new_figure((9, 5.2))
    axes = figure.add_subplot()
    lines = draw_together(axes, found, LOSS_LOOKS, options)
    axes.set_ylabel("loss", color=TEXT_COLOUR, fontsize=FONT_SIZE)
    name = plain(Path(journal_path).resolve().parent.name, 60)
    figure.suptitle(f"Loss of {name}", x=0.01, ha="left", color=TEXT_COLOUR, fontsize=TITLE_SIZE, fontweight="bold")
    last = [_last(one) for one in found.values() if len(one)]
    add_legend(figure, list(lines.values()), [f"{name} {end}" for name, end in zip(lines, last, strict=True)])
    return save(figure, Path(output_path), dpi=150)


def _last(curve: Curve) -> str:
    """The last loss, for the legend."""
    finite = curve.y[np.isfinite(curve.y)]
    return f"(last {finite[-1]:.4f})" if len(finite) else "(not finite)"
