"""Draws curves on axes: the style of all figures, lines and markers, axis scales, and notes on hidden values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from onstep.analysis.plots.series import MOST_DRAWN, Values, is_loss
from onstep.analysis.plots.shapes import PlotOptions, Shape, has_outliers
from onstep.analysis.plots.smoothing import downsampled_rows, outlier_limits
from onstep.analysis.text_tables import shortened

Dash = Literal["-", "--", ":"]
PALETTE = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#999933",
    "#332288",
    "#000000",
)
"""One color per run: Okabe and Ito's palette, extended from Paul Tol's."""
TRAINING_COLOUR, VALIDATION_COLOUR, RATE_COLOUR = "#0072B2", "#009E73", "#E69F00"
_DASHES: tuple[Dash, ...] = ("-", "--", ":")
"""Line styles; each repetition of the palette uses the next."""
TEXT_COLOUR, QUIET_COLOUR, GRID_COLOUR = "#222222", "#767676", "#e6e6e6"
FONT_SIZE, TITLE_SIZE, NOTE_SIZE = 11.0, 13.0, 9.0
LABEL_LENGTH = 60
"""Maximum length of a label in a legend."""
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))

_EXPONENT_FROM = 1e21


@dataclass(frozen=True)
class Look:
    """Color and line style of a run."""

    colour: str
    dash: Dash = "-"


def look_of(index: int) -> Look:
    """The look of the run with this index."""
    return Look(PALETTE[index % len(PALETTE)], _DASHES[index // len(PALETTE) % len(_DASHES)])


def plain(text: str, length: int | None = None) -> str:
    """Escape a text for matplotlib: no math, no line breaks, at most `length` characters."""
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return (text if length is None else shortened(text, length)).replace("$", r"\$")


class ShortNumbers(Formatter):
    """Tick labels with thousands separators, or K, M, G from `si_from` on; 3e-4 below 0.001."""

    def __init__(self, si_from: float = 1e6) -> None:
        self._si_from = si_from

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """One label per tick, with enough decimals to distinguish neighbors."""
        greatest = max((abs(value) for value in values), default=0.0)
        gaps = [abs(after - before) for before, after in pairwise(values) if after != before]
        if greatest >= _EXPONENT_FROM:
            return [_exponential(value) for value in values]
        if greatest >= self._si_from:
            unit, letter = next((unit, letter) for unit, letter in _SI if greatest >= unit)
            gap = min(gaps, default=greatest) / unit
            return [f"{_decimal(value / unit, gap)}{letter}" if value else "0" for value in values]
        if 0 < greatest < 1e-2 and min(gaps, default=greatest) < 1e-3:
            return [_exponential(value) for value in values]
        return [_decimal(value, min(gaps, default=greatest)) for value in values]


class LogNumbers(ShortNumbers):
    """Tick labels of a logarithmic axis, each with its own unit."""

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return [_exponential(value) if 0 < abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:g}" for value in values]


def style_axes(axes: Axes) -> None:
    """Remove all decoration except a faint grid."""
    axes.tick_params(colors=TEXT_COLOUR, length=0, labelsize=FONT_SIZE - 1)
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")


def number_axis(axis: Axis, *, is_integer: bool = False, si_from: float = 1e6) -> None:
    """Use few round ticks with short labels."""
    least = 1 if is_integer else 2  # a single step gets one tick, and none between steps
    locator = MaxNLocator("auto", integer=is_integer, min_n_ticks=least, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(locator)
    axis.set_major_formatter(ShortNumbers(si_from))


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Set the ticks of a logarithmic axis from `low` to `high`, even if they are less than a decade apart."""
    decades = math.log10(high / low) if 0 < low < high else 1.0
    if decades < 1:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 4 else (1,)))
    axis.set_major_formatter(LogNumbers())
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _decimal(value: float, gap: float) -> str:
    """Format with the decimals that a spacing of `gap` requires."""
    decimals = max(0, min(6, math.ceil(-math.log10(gap) - 1e-9))) if gap > 0 else 0
    digits = gap * 10**decimals
    if gap > 0 and decimals < 6 and abs(digits - round(digits)) >= 1e-6 * max(1.0, abs(digits)):
        decimals += 1  # steps of 0.25
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if float(text.replace(",", "")) == 0 else text


def _exponential(value: float) -> str:
    """3e-4 instead of 0.0003."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _scale_y(axes: Axes, shapes: Sequence[Shape], options: PlotOptions) -> None:
    """Set scale, limits and ticks to fit the shapes; given bounds take precedence."""
    values = np.concatenate([*(shape.raw.y for shape in shapes), np.empty(0)])
    values = values[np.isfinite(values)]
    is_log = options.log_scale and bool((values > 0).any())
    if is_log:
        axes.set_yscale("log", nonpositive="mask")
        low = max(float(values[values > 0].min()), 1 / MOST_DRAWN)
        high = max(float(values.max()), low)
        room = max((high / low) ** 0.05, 1.02)
        limits = low / room, high * room
    else:
        spiky = [shape.raw.y for shape in shapes if has_outliers(shape.metric)]
        limits = (outlier_limits(spiky) if options.ignore_outliers else None) or _range(values)
    axes.set_ylim(*_bounded(limits, options, is_log=is_log))
    if is_log:
        log_axis(axes.yaxis, *axes.get_ylim())
    else:
        number_axis(axes.yaxis, si_from=1e4)


def _bounded(limits: tuple[float, float], options: PlotOptions, *, is_log: bool) -> tuple[float, float]:
    """The limits with the given bounds; if a bound is beyond all data, the other limit is moved away from it."""
    low = limits[0] if options.y_min is None else options.y_min
    high = limits[1] if options.y_max is None else options.y_max
    if low < high:
        return low, high
    if options.y_max is not None:
        return (high / 10 if is_log else high - (abs(high) or 1.0)), high
    return low, (low * 10 if is_log else low + max(abs(low), 1.0))


def _range(values: Values) -> tuple[float, float]:
    if len(values) == 0:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    room = 0.05 * (high - low) or 0.05 * abs(high) or 0.5
    return low - room, high + room


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
"""Curves with at most this many points have markers."""


def metric_name(metric: str, options: PlotOptions) -> str:
    """Name of a metric in figures; escape it with `plain` for matplotlib."""
    name = NAMES.get(metric, metric)
    if options.perplexity and is_loss(metric):
        return name.removesuffix("loss") + "perplexity"
    return name


def draw(axes: Axes, shape: Shape, look: Look, label: str) -> None:
    """Draw a curve: a line, with markers if there are few points; a smoothed line has the raw line faintly below."""
    if len(shape.raw) == 0:
        return
    faint = shape.smoothed is not None
    if faint:
        axes.plot(*_few(shape, shape.raw.y), color=look.colour, linewidth=0.7, alpha=0.28, zorder=2)
    has_markers = len(shape.raw) <= _MARKERS_UP_TO
    axes.plot(
        *_few(shape, shape.shown),
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
        _draw_alone(axes, *_few(shape, shape.raw.y), look)
    _mark_gaps(axes, shape.raw.x[np.isnan(shape.raw.y) & shape.is_inside], look)


def _few(shape: Shape, y: Values) -> tuple[Values, Values]:
    """The points that yield the same picture, at the resolution of the axis."""
    x = shape.raw.x
    is_log = shape.log_x and len(x) > 0 and x[0] > 0
    rows = downsampled_rows(np.log10(x) if is_log else x, y)
    return x[rows], y[rows]


def finish_axes(axes: Axes, shapes: Sequence[Shape], options: PlotOptions, *, neighbours: Sequence[Shape] = ()) -> None:
    """Set scale, limits, ticks and the note of axes with `shapes`; `neighbours` share their y limits."""
    style_axes(axes)
    _scale_y(axes, [*shapes, *neighbours], options)
    axes.margins(x=0.02)
    if options.x_min is not None and options.x_max is not None:
        axes.set_xlim(options.x_min, options.x_max)
    _scale_x(axes, [*shapes, *neighbours], options)
    name = _X_NAMES.get(options.x_axis, "time (hours)" if options.in_hours else "time (minutes)")
    axes.set_xlabel(name, color=TEXT_COLOUR, fontsize=FONT_SIZE)
    note = _note(axes, shapes)
    if note:
        axes.set_title(note, loc="right", color=QUIET_COLOUR, fontsize=NOTE_SIZE)
    if not any(len(shape.inside) for shape in shapes):
        names = " or ".join(dict.fromkeys(plain(shape.metric) for shape in shapes))
        text = f"no {names} here"
        axes.text(
            0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=QUIET_COLOUR, fontsize=FONT_SIZE
        )


def _scale_x(axes: Axes, shapes: Sequence[Shape], options: PlotOptions) -> None:
    """Set the scale and the ticks of the x axis; logarithmic ones need a positive x."""
    known = [shape.inside.x for shape in shapes if len(shape.inside)]
    if not options.log_x or not any(x[-1] > 0 for x in known):
        is_step = options.x_axis == "step"
        number_axis(axes.xaxis, is_integer=is_step, si_from=1e6 if is_step else 1e4)
        return
    axes.set_xscale("log", nonpositive="mask")
    if options.x_min is None:
        low, high = min(float(x[x > 0][0]) for x in known if x[-1] > 0), max(float(x[-1]) for x in known)
        room = max((high / low) ** 0.02, 1.02)
        axes.set_xlim(low / room, high * room)
    log_axis(axes.xaxis, *axes.get_xlim())


def add_legend(figure: Figure, handles: Sequence[Line2D], labels: Sequence[str]) -> None:
    """Add one legend below a figure, in as many columns as fit."""
    shown = [plain(label, LABEL_LENGTH) for label in labels]
    shown = [f" {label}" if label.startswith("_") else label for label in shown]  # matplotlib omits these
    room = int(figure.get_figwidth() * 10.5)
    columns = max(1, min(len(shown), room // (max(map(len, shown)) + 7)))
    legend = figure.legend(
        handles, shown, loc="outside lower center", ncols=columns, frameon=False, fontsize=FONT_SIZE, handlelength=1.8
    )
    for text in legend.get_texts():
        text.set_color(TEXT_COLOUR)


def legend_line(look: Look, *, has_markers: bool = False) -> Line2D:
    """The legend handle of a run."""
    return Line2D(
        [], [], color=look.colour, linestyle=look.dash, linewidth=2.2, marker="o" if has_markers else "", markersize=5
    )


def _draw_alone(axes: Axes, x: Values, y: Values, look: Look) -> None:
    """Draw dots for isolated points between two gaps."""
    is_gap = np.concatenate([[True], np.isnan(y), [True]])
    alone = is_gap[:-2] & ~is_gap[1:-1] & is_gap[2:]
    if alone.any():
        axes.plot(x[alone], y[alone], linestyle="", marker="o", markersize=2.5, color=look.colour, zorder=3)


def _mark_gaps(axes: Axes, x: Values, look: Look) -> None:
    """Draw small crosses on the x axis where a metric is not finite."""
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
    """A note on values that the axes do not show: not finite, or beyond the limits."""
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
