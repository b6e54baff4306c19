"""Curves on axes: lines, markers, the scales of both axes, and a note on what does not show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from onstep.analysis.plots_shape import PlotOptions, Shape, has_outliers
from onstep.analysis.plots_style import (
    FONT_SIZE,
    LABEL_LENGTH,
    NOTE_SIZE,
    QUIET_COLOUR,
    TEXT_COLOUR,
    Look,
    log_axis,
    number_axis,
    plain,
    style_axes,
)
from onstep.analysis.series import Curve, is_loss
from onstep.analysis.smoothing import outlier_limits, thin

Values = NDArray[np.float64]


def scale_y(axes: Axes, shapes: Sequence[Shape], options: PlotOptions) -> None:
    """Scale, limits and ticks that fit the shapes; bounds that were given win over all."""
    values = np.concatenate([*(shape.raw.y for shape in shapes), np.empty(0)])
    values = values[np.isfinite(values)]
    is_log = options.log_scale and bool((values > 0).any())
    if is_log:
        axes.set_yscale("log", nonpositive="mask")
        limits = _log_range(values[values > 0])
    else:
        limits = _bulk(shapes, options) or _range(values)
    axes.set_ylim(*_bounded(limits, options, is_log=is_log))
    if is_log:
        log_axis(axes.yaxis, *axes.get_ylim())
    else:
        number_axis(axes.yaxis, si_from=1e4)


def _bounded(limits: tuple[float, float], options: PlotOptions, *, is_log: bool) -> tuple[float, float]:
    """The limits with the given bounds; where a bound is beyond all of the data, the other end moves away from it."""
    low = limits[0] if options.y_min is None else options.y_min
    high = limits[1] if options.y_max is None else options.y_max
    if low < high:
        return low, high
    if options.y_max is not None:
        return (high / 10 if is_log else high - (abs(high) or 1.0)), high
    return low, (low * 10 if is_log else low + max(abs(low), 1.0))


def _bulk(shapes: Sequence[Shape], options: PlotOptions) -> tuple[float, float] | None:
    """Limits that leave outliers out, where that is wanted and fits the metrics."""
    spiky = [shape.raw.y for shape in shapes if has_outliers(shape.metric)]
    return outlier_limits(spiky) if options.ignore_outliers else None


def _range(values: Values) -> tuple[float, float]:
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


def _log_range(values: Values) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = max((high / low) ** 0.05, 1.02)
    return low / room, high * room


NAMES = {
    "loss": "training loss",
    "eval_loss": "validation loss",
    "test_loss": "test loss",
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm",
    "max_grad_norm": "largest gradient norm",
    "eval_perplexity": "validation perplexity",
}
_X_NAMES = {"step": "step", "epoch": "epoch", "tokens": "tokens", "flops": "floating-point operations"}
_MARKERS_UP_TO = 50
"""Points of a curve that get a marker each."""
_HOURS_FROM = 180.0
"""Minutes from which on a time axis counts hours."""


def metric_name(metric: str, options: PlotOptions) -> str:
    """What a figure calls a metric; `plain` makes it fit for matplotlib."""
    name = NAMES.get(metric, metric)
    if options.perplexity and is_loss(metric):
        return name.removesuffix("loss") + "perplexity"
    return name


def draw(axes: Axes, shape: Shape, look: Look, label: str, *, time_unit: float = 1.0) -> None:
    """Draw a curve: a line with markers where there are few points; a faint line below a smoothed one.

    Args:
        axes: Where to.
        shape: The curve.
        look: Its colour.
        label: What a legend calls it.
        time_unit: What x is divided by.
    """
    if len(shape.raw) == 0:
        return
    x = shape.raw.x / time_unit
    faint = shape.smoothed is not None
    if faint:
        axes.plot(*thin(x, shape.raw.y), color=look.colour, linewidth=0.7, alpha=0.28, zorder=2)
    has_markers = len(shape.raw) <= _MARKERS_UP_TO
    axes.plot(
        *thin(x, shape.shown),
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.8 if faint or has_markers else 1.2,
        marker="o" if has_markers else "",
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.8,
        label=label,
        zorder=3,
    )
    if not has_markers:
        _draw_alone(axes, *thin(x, shape.raw.y), look)
    _mark_gaps(axes, x[np.isnan(shape.raw.y) & shape.is_inside], look)


def finish_axes(
    axes: Axes,
    shapes: Sequence[Shape],
    options: PlotOptions,
    *,
    time_unit: float = 1.0,
    neighbours: Sequence[Shape] = (),
) -> None:
    """Scale, limits, ticks and the note of axes on which `shapes` were drawn; `neighbours` share the y limits."""
    style_axes(axes)
    scale_y(axes, [*shapes, *neighbours], options)
    axes.margins(x=0.02)
    if options.x_min is not None and options.x_max is not None:
        axes.set_xlim(options.x_min / time_unit, options.x_max / time_unit)
    number_axis(axes.xaxis, is_integer=options.x_axis == "step", si_from=1e6 if options.x_axis == "step" else 1e4)
    axes.set_xlabel(x_name(options, time_unit), color=TEXT_COLOUR, fontsize=FONT_SIZE)
    note = _note(axes, shapes)
    if note:
        axes.set_title(note, loc="right", color=QUIET_COLOUR, fontsize=NOTE_SIZE)
    if not any(len(shape.inside) for shape in shapes):
        _say_empty(axes, shapes)


def time_unit(options: PlotOptions, curves: Sequence[Curve]) -> float:
    """What minutes are divided by on the time axis of a figure: 60 where it is long; 1 on all other axes."""
    if options.x_axis != "time":
        return 1.0
    return 60.0 if max((float(one.x[-1]) for one in curves if len(one)), default=0.0) > _HOURS_FROM else 1.0


def x_name(options: PlotOptions, unit: float) -> str:
    """What the x axis shows."""
    return _X_NAMES.get(options.x_axis, "time (hours)" if unit == 60 else "time (minutes)")


def add_legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str]) -> None:
    """One legend for a whole figure, below it, in as many columns as there is room for."""
    shown = [_legend_label(label) for label in labels]
    room = int(figure.get_figwidth() * 10.5)
    columns = max(1, min(len(shown), room // (max(map(len, shown)) + 7)))
    legend = figure.legend(
        handles, shown, loc="outside lower center", ncols=columns, frameon=False, fontsize=FONT_SIZE, handlelength=1.8
    )
    for text in legend.get_texts():
        text.set_color(TEXT_COLOUR)


def legend_line(look: Look, *, has_markers: bool = False) -> Line2D:
    """What stands for a run in a legend."""
    return Line2D(
        [], [], color=look.colour, linestyle=look.dash, linewidth=2.2, marker="o" if has_markers else "", markersize=5
    )


def _legend_label(label: str) -> str:
    """Matplotlib leaves out of a legend what begins with an underscore."""
    shown = plain(label, LABEL_LENGTH)
    return f" {shown}" if shown.startswith("_") else shown


def _draw_alone(axes: Axes, x: Values, y: Values, look: Look) -> None:
    """Dots for points between two gaps, which no line reaches."""
    is_gap = np.concatenate([[True], np.isnan(y), [True]])
    alone = is_gap[:-2] & ~is_gap[1:-1] & is_gap[2:]
    if alone.any():
        axes.plot(x[alone], y[alone], linestyle="", marker="o", markersize=2.5, color=look.colour, zorder=3)


def _mark_gaps(axes: Axes, x: Values, look: Look) -> None:
    """Small crosses on the x axis where a metric was not finite."""
    if len(x):
        across = axes.get_xaxis_transform()
        places = np.unique(x)[:: max(1, len(x) // 500)]
        axes.plot(
            places,
            np.full(len(places), 0.012),
            transform=across,
            linestyle="",
            marker="x",
            markersize=5,
            markeredgewidth=1.2,
            color=look.colour,
            clip_on=False,
            zorder=4,
        )


def _note(axes: Axes, shapes: Sequence[Shape]) -> str:
    """What the axes do not show: values that are not finite, and those beyond the limits."""
    notes = []
    missing = sum(shape.inside.num_not_finite for shape in shapes)
    if missing:
        notes.append(f"{missing:,} not finite (x)")
    low, high = axes.get_ylim()
    values = np.concatenate([*(shape.inside.y for shape in shapes), np.empty(0)])
    values = values[np.isfinite(values)]
    if len(values) and values.max() > high:
        notes.append(f"up to {values.max():,.4g} outside")
    if len(values) and values.min() < low:
        notes.append(f"down to {values.min():,.4g} outside")
    return ", ".join(notes)


def _say_empty(axes: Axes, shapes: Sequence[Shape]) -> None:
    """What to say where all points lie beyond the bounds of the x axis."""
    names = " or ".join(dict.fromkeys(plain(shape.metric) for shape in shapes))
    axes.text(
        0.5,
        0.5,
        f"no {names} here",
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=QUIET_COLOUR,
        fontsize=FONT_SIZE,
    )
