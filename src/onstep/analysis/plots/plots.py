"""Plots metrics of one or more runs: any metrics, the losses, or the gradient norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from onstep.analysis.logs.tokenizers import loss_unit
from onstep.analysis.logs.training_log import TrainingLog, distinct_labels
from onstep.analysis.plots.axes import (
    FONT_SIZE,
    RATE_COLOUR,
    TEXT_COLOUR,
    TITLE_SIZE,
    TRAINING_COLOUR,
    VALIDATION_COLOUR,
    Look,
    add_legend,
    draw,
    finish_axes,
    legend_line,
    look_of,
    metric_name,
    number_axis,
    plain,
)
from onstep.analysis.plots.output import finish, new_figure, save
from onstep.analysis.plots.series import Curve, check_x_axis, curves, is_of_evaluation, rows_of
from onstep.analysis.plots.shapes import PlotOptions, found_curves, shaped
from onstep.errors import ConfigError, DataError

DEFAULT_METRICS = ("loss", "eval_loss", "learning_rate")
LOSS_LOOKS = {"loss": Look(TRAINING_COLOUR), "eval_loss": Look(VALIDATION_COLOUR)}
_NORM_LOOKS = {"grad_norm": Look(TRAINING_COLOUR), "max_grad_norm": Look(RATE_COLOUR)}
_TITLE_LENGTH = 90
_NAME_LENGTH = 50


def plot_training_metrics(
    logs: Sequence[TrainingLog] | TrainingLog,
    metrics: Sequence[str] | None = None,
    x_axis: str = "step",
    smooth_window: int | None = None,
    log_scale: bool = False,
    output_path: str | Path | None = None,
    figsize: tuple[float, float] = (12, 8),
    show: bool = False,
    title: str | None = None,
    ignore_outliers: bool = True,
    perplexity: bool = False,
    x_min: float | None = None,
    x_max: float | None = None,
    y_min: float | None = None,
    y_max: float | None = None,
    log_x: bool = False,
) -> Figure:
    """Plot one axes per metric, in two columns, with a curve per run.

    Args:
        logs: The runs, or a single run.
        metrics: Keys of their records; None: loss, eval_loss and learning_rate, if logged.
        x_axis: "step", "epoch", "time" (since the first plotted record, in minutes, or hours for long runs), "tokens"
            or "flops" (both cumulative; an evaluation is placed at the total of its step).
        smooth_window: Window of a centered moving mean in points, drawn over the raw line; 1 draws only the raw line;
            None chooses by the number of points. Evaluations and learning rates are not smoothed.
        log_scale: Whether the y axes are logarithmic.
        output_path: The image to write (.png, .svg, .pdf); None writes none.
        figsize: Width and height in inches.
        show: Whether to open the image in the system's viewer.
        title: Title of the figure; None: the label of the run, if there is only one.
        ignore_outliers: Whether a few outliers are ignored in the y limits of losses and gradient norms, and isolated
            ones in the moving mean; a note gives their range. Logarithmic axes show them.
        perplexity: Whether to plot exp(loss) instead of the loss; a smoothed perplexity is that of the mean loss.
        x_min: Lower limit of the x axis, in its unit (minutes for "time").
        x_max: Upper limit of the x axis; None for that of the data.
        y_min: Lower limit of every y axis; overrides the data and `ignore_outliers`.
        y_max: Upper limit of every y axis; None for those of the data.
        log_x: Whether the x axes are logarithmic; a point at 0 is left out.

    Returns:
        The figure, a `matplotlib.figure.Figure` that is not registered with pyplot.

    Raises:
        ConfigError: a ValueError; for an invalid option, for x limits without any point between them, and for an empty
            list of logs.
        DataError: if no run has one of the metrics, or its records have no value for the x axis.
    """
    options = PlotOptions(
        x_axis, smooth_window, log_scale, output_path, figsize, show, title, ignore_outliers, perplexity,
        x_min, x_max, y_min, y_max, log_x,
    )  # fmt: skip
    logs = _as_list(logs)
    return _draw_grid(logs, default_metrics(logs, x_axis) if metrics is None else list(metrics), options)


def plot_loss_curves(
    logs: Sequence[TrainingLog] | TrainingLog,
    x_axis: str = "step",
    smooth_window: int | None = None,
    log_scale: bool = False,
    output_path: str | Path | None = None,
    figsize: tuple[float, float] = (11, 6),
    show: bool = False,
    title: str | None = None,
    ignore_outliers: bool = True,
    perplexity: bool = False,
    x_min: float | None = None,
    x_max: float | None = None,
    y_min: float | None = None,
    y_max: float | None = None,
    log_x: bool = False,
) -> Figure:
    """Plot the losses: for a single run with its learning rate, for several with training and validation side by side.

    Parameters, result and exceptions are those of `plot_training_metrics`.

    Args:
        logs: the logs, in the order of the legend.
        x_axis: the horizontal axis: `step`, `epoch`, `tokens` or `time`.
        smooth_window: records of the running mean; 1 for none, None for one by the number of records.
        log_scale: whether the vertical axis is logarithmic.
        output_path: the file to write, in the format of its suffix; None for none.
        figsize: width and height in inches.
        show: whether a window is opened.
        title: the title; None for one that is made from the runs.
        ignore_outliers: whether the vertical axis leaves outliers out.
        perplexity: whether exp(loss) is drawn.
        x_min: the left end of the axis; None for that of the data.
        x_max: the right end of the axis; None for that of the data.
        y_min: the lower end of the axis; None for that of the data.
        y_max: the upper end of the axis; None for that of the data.
        log_x: whether the horizontal axis is logarithmic.
    """
    options = PlotOptions(
        x_axis, smooth_window, log_scale, output_path, figsize, show, title, ignore_outliers, perplexity,
        x_min, x_max, y_min, y_max, log_x,
    )  # fmt: skip
    logs = _as_list(logs)
    if len(logs) == 1:
        return _draw_one_run(logs[0], LOSS_LOOKS, "perplexity" if options.perplexity else "loss", options)
    known = [metric for metric in LOSS_LOOKS if any(log.has(metric).any() for log in logs)]
    return _draw_grid(logs, known or list(LOSS_LOOKS), options, share_y=True)


def plot_grad_norm(
    logs: Sequence[TrainingLog] | TrainingLog,
    x_axis: str = "step",
    smooth_window: int | None = None,
    log_scale: bool = False,
    output_path: str | Path | None = None,
    figsize: tuple[float, float] = (11, 6),
    show: bool = False,
    title: str | None = None,
    ignore_outliers: bool = True,
    x_min: float | None = None,
    x_max: float | None = None,
    y_min: float | None = None,
    y_max: float | None = None,
    log_x: bool = False,
) -> Figure:
    """Plot the gradient norm before clipping; for a single run, also its maximum between logged steps, if logged.

    Parameters, result and exceptions are those of `plot_training_metrics`.

    Args:
        logs: the logs, in the order of the legend.
        x_axis: the horizontal axis: `step`, `epoch`, `tokens` or `time`.
        smooth_window: records of the running mean; 1 for none, None for one by the number of records.
        log_scale: whether the vertical axis is logarithmic.
        output_path: the file to write, in the format of its suffix; None for none.
        figsize: width and height in inches.
        show: whether a window is opened.
        title: the title; None for one that is made from the runs.
        ignore_outliers: whether the vertical axis leaves outliers out.
        x_min: the left end of the axis; None for that of the data.
        x_max: the right end of the axis; None for that of the data.
        y_min: the lower end of the axis; None for that of the data.
        y_max: the upper end of the axis; None for that of the data.
        log_x: whether the horizontal axis is logarithmic.
    """
    options = PlotOptions(
        x_axis, smooth_window, log_scale, output_path, figsize, show, title, ignore_outliers, False,
        x_min, x_max, y_min, y_max, log_x,
    )  # fmt: skip
    logs = _as_list(logs)
    if len(logs) > 1:
        return _draw_grid(logs, ["grad_norm"], options)
    return _draw_one_run(logs[0], _NORM_LOOKS, "gradient norm", options)


def default_metrics(logs: Sequence[TrainingLog], x_axis: str = "step") -> list[str]:
    """The metrics of `DEFAULT_METRICS` that a run has; all of them if no run has any."""
    check_x_axis(x_axis)
    known = [metric for metric in DEFAULT_METRICS if any(rows_of(log, metric).any() for log in logs)]
    return known or list(DEFAULT_METRICS)


def _as_list(logs: Sequence[TrainingLog] | TrainingLog) -> list[TrainingLog]:
    found = [logs] if isinstance(logs, TrainingLog) else list(logs)
    if not found:
        raise ConfigError("there is no log to plot; pass at least one.")
    return found


def _draw_grid(logs: list[TrainingLog], metrics: list[str], options: PlotOptions, *, share_y: bool = False) -> Figure:
    """Draw a grid of axes in two columns; the last of an odd number spans both."""
    of_metric, options = found_curves(logs, metrics, options)
    unit = loss_unit(logs)
    of_metric = [
        [replace(one, y=one.y / unit.divisor(index, metric)) for index, one in enumerate(row)]
        for metric, row in zip(metrics, of_metric, strict=True)
    ]
    rows = [[shaped(one, metric, options) for one in row] for metric, row in zip(metrics, of_metric, strict=True)]
    neighbours = [shape for row in rows for shape in row] if share_y else []
    figure = new_figure(options.figsize)
    for axes, metric, row in zip(_grid(figure, len(metrics)), metrics, rows, strict=True):
        for index, shape in enumerate(row):
            draw(axes, shape, look_of(index), f"run {index + 1}")
        finish_axes(axes, row, options, neighbours=neighbours)
        name = plain(metric_name(metric, options) + unit.suffix(metric), _NAME_LENGTH)
        axes.set_title(name, loc="left", color=TEXT_COLOUR, fontsize=FONT_SIZE + 1)
    runs = distinct_labels(logs) if len(logs) > 1 else []
    return _finished(figure, logs, {run: legend_line(look_of(index)) for index, run in enumerate(runs)}, options)


def _draw_one_run(log: TrainingLog, looks: Mapping[str, Look], y_name: str, options: PlotOptions) -> Figure:
    """Draw metrics of one run on the left axis and, with losses, the learning rate on the right axis."""
    with_rate = "loss" in looks
    metrics = [*looks, "learning_rate"] if with_rate else [*looks]
    of_metric, options = found_curves([log], metrics, options, need=len(looks))
    found = dict(zip(metrics, (row[0] for row in of_metric), strict=True))
    figure = new_figure(options.figsize)
    axes = figure.add_subplot()
    lines = _draw_together(axes, {metric: found[metric] for metric in looks}, looks, options)
    axes.set_ylabel(y_name, color=TEXT_COLOUR, fontsize=FONT_SIZE)
    if with_rate and len(found["learning_rate"]):
        lines["learning rate"] = _draw_rate(axes, found["learning_rate"], options)
    return _finished(figure, [log], lines, options)


def _draw_together(
    axes: Axes, found: Mapping[str, Curve], looks: Mapping[str, Look], options: PlotOptions
) -> dict[str, Line2D]:
    """Draw metrics of one run on one axes; returns the legend handles by name."""
    shapes = [shaped(points, metric, options) for metric, points in found.items()]
    lines = {}
    for shape in shapes:
        if len(shape.raw):
            name, look = metric_name(shape.metric, options), looks[shape.metric]
            draw(axes, shape, look, name)
            lines[name] = legend_line(look, has_markers=is_of_evaluation(shape.metric))
    finish_axes(axes, shapes, options)
    return lines


def _draw_rate(axes: Axes, rate: Curve, options: PlotOptions) -> Line2D:
    right = axes.twinx()
    seen, look = rate.within(options.x_min, options.x_max), Look(RATE_COLOUR, "--")
    marker = "o" if len(rate) == 1 else ""  # a line of one point is invisible
    right.plot(
        seen.x, seen.y, color=look.colour, linestyle=look.dash, linewidth=1.4, marker=marker, markersize=5, zorder=1
    )
    right.set_ylim(bottom=0)
    number_axis(right.yaxis, si_from=1e4)
    right.tick_params(colors="#9a6a00", length=0, labelsize=FONT_SIZE - 1)
    right.set_ylabel("learning rate", color="#9a6a00", fontsize=FONT_SIZE)
    for spine in right.spines.values():
        spine.set_visible(False)
    axes.set_zorder(right.get_zorder() + 1)
    axes.patch.set_visible(False)
    return legend_line(look)


def _grid(figure: Figure, num: int) -> list[Axes]:
    if num == 1:
        return [figure.add_subplot()]
    grid = figure.add_gridspec(-(-num // 2), 2)
    places = [grid[index // 2, index % 2] for index in range(num)]
    if num % 2:
        places[-1] = grid[num // 2, :]
    return [figure.add_subplot(place) for place in places]


def _finished(figure: Figure, logs: list[TrainingLog], legend: Mapping[str, Line2D], options: PlotOptions) -> Figure:
    """Add title and legend to the figure, then save and show it as requested."""
    title = options.title if options.title is not None else distinct_labels(logs)[0] if len(logs) == 1 else ""
    if title:
        _put_title(figure, plain(title, _TITLE_LENGTH))
    if legend:
        add_legend(figure, [*legend.values()], [*legend])
    return finish(figure, options.output_path, show=options.show)


def _put_title(figure: Figure, title: str) -> None:
    figure.suptitle(title, x=0.01, ha="left", color=TEXT_COLOUR, fontsize=TITLE_SIZE, fontweight="bold")


def plot_loss(metrics_log_path: str | Path, output_path: str | Path) -> Path:
    """Plot training and validation loss over optimizer steps, as `onstep train` does at the end.

    With many points, a centered moving mean is drawn over the raw line. NaN or infinite losses leave a gap.
    `plot_loss_curves` has more options.

    Args:
        metrics_log_path: A `trainer_logs.json`; the run may be running or killed.
        output_path: The image; its suffix gives the format (.png, .svg, .pdf). Its directory is created if needed.

    Returns:
        `output_path`.

    Raises:
        FileNotFoundError: if the metrics log does not exist.
        DataError: if the file is not a metrics log, or has no loss to plot.
    """
    log = TrainingLog.from_file(metrics_log_path)
    options = PlotOptions(ignore_outliers=False)
    found = {metric: row[0] for metric, row in zip(LOSS_LOOKS, curves([log], list(LOSS_LOOKS), "step"), strict=True)}
    if not any(map(len, found.values())):
        raise DataError(
            f"{metrics_log_path} has no record with 'loss' or 'eval_loss'; log at least one step, then plot."
        )
    figure = new_figure((9, 5.2))
    axes = figure.add_subplot()
    lines = _draw_together(axes, found, LOSS_LOOKS, options)
    axes.set_ylabel("loss", color=TEXT_COLOUR, fontsize=FONT_SIZE)
    name = plain(Path(metrics_log_path).resolve().parent.name, 60)
    _put_title(figure, f"Loss of {name}")
    last = [one.y[np.isfinite(one.y)] for one in found.values() if len(one)]
    ends = [f"(last {finite[-1]:.4f})" if len(finite) else "(not finite)" for finite in last]
    add_legend(figure, list(lines.values()), [f"{name} {end}" for name, end in zip(lines, ends, strict=True)])
    return save(figure, Path(output_path), dpi=150)
