"""Plots heat maps of per-parameter metrics: norms, spectral norms and gradient norms."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from onstep.analysis.logs.columns import number
from onstep.analysis.logs.training_log import TrainingLog
from onstep.analysis.plots.axes import FONT_SIZE, NOTE_SIZE, QUIET_COLOUR, TEXT_COLOUR, TITLE_SIZE, plain
from onstep.analysis.plots.output import finish, new_figure
from onstep.analysis.plots.series import MOST_DRAWN, drawable
from onstep.analysis.plots.shapes import check_figsize, check_range
from onstep.errors import ConfigError, DataError

KEYS = {"norm": "norms", "spectral_norm": "spectral_norms", "grad_norm": "grad_norms"}
"""Metric -> key of a record that contains the values of all parameters."""
NAMES = {"norm": "parameter norm", "spectral_norm": "spectral norm", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class ParameterTable:
    """One value per parameter and step."""

    log_path: Path
    metric: str
    parameters: list[str]
    steps: NDArray[np.float64]
    """Shape (num_steps,)."""
    values: NDArray[np.float64]
    """Shape (num_parameters, num_steps); NaN where a record has no `drawable` value for the parameter."""


def read_table(
    log_path: str | Path, metric: str | None = None, filter_pattern: str | None = None, step_stride: int = 1
) -> ParameterTable:
    """Read the table of a `parameter_norms.json` or `gradient_norms.json`, with parameters in order of appearance.

    Args:
        log_path: The file; the run may be running or killed.
        metric: A key of `KEYS`; None uses the first one that the file has.
        filter_pattern: A regular expression; only parameters whose name matches are included.
        step_stride: Use every `step_stride`-th record.

    Raises:
        FileNotFoundError: if the file does not exist.
        ConfigError: for an unknown metric, a stride below 1, or an invalid regular expression.
        DataError: if there are no records, none has the metric, or no parameter matches the pattern.
    """
    if step_stride < 1:
        raise ConfigError(f"step_stride must be at least 1, got {step_stride}.")
    try:
        pattern = re.compile(filter_pattern or "")
    except re.error as error:
        raise ConfigError(f"filter must be a regular expression, got {filter_pattern!r}: {error}.") from None
    log = TrainingLog.from_file(log_path)
    chosen = _chosen(log, metric)
    records = [record for record in log.records if isinstance(record.get(KEYS[chosen]), dict)][::step_stride]
    tables = [record[KEYS[chosen]] for record in records]
    parameters = list({name: None for table in tables for name in table})
    kept = [name for name in parameters if pattern.search(name)]
    if not kept:
        there = ", ".join(parameters[:5])
        raise DataError(
            f"{log.log_path} has no parameter that matches {filter_pattern!r}; it has {len(parameters)}: {there}"
            f"{', ...' if len(parameters) > 5 else ''}."
        )
    steps = np.array([number(record.get("global_step")) for record in records])
    values = np.array([[number(table.get(name)) for table in tables] for name in kept], dtype=np.float64)
    return ParameterTable(log.log_path, chosen, kept, steps, drawable(values))


def _chosen(log: TrainingLog, metric: str | None) -> str:
    if metric is not None and metric not in KEYS:
        raise ConfigError(f"metric must be one of {', '.join(KEYS)}, got {metric!r}.")
    if log.num_records == 0:
        raise DataError(f"{log.log_path} has no records yet; one is written at each evaluation.")
    known = [name for name, key in KEYS.items() if log.has(key).any()]
    if not known:
        keys = ", ".join(log.keys()[:_MOST_LISTED])
        raise DataError(f"{log.log_path} has none of {', '.join(KEYS.values())}; its records have {keys}.")
    if metric is not None and metric not in known:
        raise DataError(f"{log.log_path} has no {KEYS[metric]!r}; choose {' or '.join(map(repr, known))}.")
    return metric or known[0]


_MOST_LISTED = 50
"""Maximum number of keys listed in an error message."""
DPI = 200
_MOST_PIXELS = 40e6
"""Large figures (up to 40 by 60 inches) are drawn at a lower resolution to limit memory use."""
LABEL_LENGTH = 60
_HEAD, _LONGEST_HEAD = 19, 34
"""Leading characters kept of a shortened name: if it has no layer number, and at most."""
_MANY_STEPS, _STEP_TICKS = 30, 20
_MISSING_COLOUR = "#d0d0d0"
_BAR_LENGTH, _BAR_WIDTH = 6.0, 0.2
"""In inches; the length is a maximum."""
_LEAST_LABEL_SIZE, _POINTS_PER_INCH = 4.0, 72.0


def plot_parameter_heatmap(
    log_path: str | Path,
    metric: str | None = None,
    filter_pattern: str | None = None,
    step_stride: int = 1,
    log_scale: bool = False,
    vmin: float | None = None,
    vmax: float | None = None,
    title: str | None = None,
    output_path: str | Path | None = None,
    figsize: tuple[float, float] | None = None,
    show: bool = False,
) -> Figure:
    """Plot a row per parameter and a column per logged step, with the value as color; missing values are gray.

    Args:
        log_path: A `parameter_norms.json` or `gradient_norms.json`; the run may be running or killed.
        metric: "norm", "spectral_norm" or "grad_norm"; None uses the first one that the file has.
        filter_pattern: A regular expression; only parameters whose name matches are shown.
        step_stride: Show every `step_stride`-th record.
        log_scale: Whether the color scale is logarithmic; values that are not positive are then gray.
        vmin: Value of the lowest color; None: the minimum (on a logarithmic scale, the smallest positive value). If
            there are values beyond `vmin` or `vmax`, that end of the color bar is pointed.
        vmax: Value of the highest color; None: the maximum.
        title: Title of the figure; None: the metric and the run's directory.
        output_path: The image to write (.png, .svg, .pdf); None writes none.
        figsize: Width and height in inches; None: as needed for the rows and columns, 10 to 40 by 6 to 60.
        show: Whether to open the image in the system's viewer.

    Returns:
        The figure, a `matplotlib.figure.Figure` that is not registered with pyplot.

    Raises:
        FileNotFoundError: if the file does not exist.
        ConfigError: a ValueError; for an invalid option.
        DataError: a ValueError; for a file without records, without the metric, or without a matching parameter.
    """
    check_range("v", vmin, vmax)
    table = read_table(log_path, metric, filter_pattern, step_stride)
    rows, columns = table.values.shape
    fitting = min(max(0.15 * columns + 2, 10.0), 40.0), min(max(0.25 * rows + 2, 6.0), 60.0)
    size = fitting if figsize is None else figsize
    check_figsize(size)
    figure = new_figure(size)
    axes = figure.add_subplot()
    colours = _colours(table, log_scale, vmin, vmax)
    cells = _draw_cells(axes, table.values, colours)
    _label_rows(axes, table, size[1])
    _label_steps(axes, table)
    _add_bar(figure, axes, cells, NAMES[table.metric])
    _put_title(axes, table, title)
    dpi = int(min(DPI, (_MOST_PIXELS / (size[0] * size[1])) ** 0.5))
    return finish(figure, output_path, show=show, dpi=dpi)


def _draw_cells(axes: Axes, values: NDArray[np.float64], colours: Normalize) -> QuadMesh:
    """Draw a cell per value, centered on its row and column; the first row is at the top."""
    rows, columns = values.shape
    cells = axes.pcolormesh(
        np.arange(columns + 1) - 0.5,
        np.arange(rows + 1) - 0.5,
        np.ma.masked_invalid(values),
        cmap=colormaps["viridis"].with_extremes(bad=_MISSING_COLOUR),
        norm=colours,
        rasterized=True,
    )
    axes.invert_yaxis()
    return cells


def short_label(name: str) -> str:
    """Shorten a parameter name of more than 60 characters: its start up to the layer number, dots, and its end."""
    if len(name) <= LABEL_LENGTH:
        return name
    numbers = [found.end() for found in re.finditer(r"(?<![^.])\d+(?![^.])", name)]
    head = name[: next((end for end in reversed(numbers) if end <= _LONGEST_HEAD), numbers[0] if numbers else _HEAD)]
    if len(head) > _LONGEST_HEAD:
        head = f"...{head[3 - _LONGEST_HEAD :]}"
    return f"{head}...{name[len(head) + 3 - LABEL_LENGTH :]}"


def _colours(table: ParameterTable, log_scale: bool, vmin: float | None, vmax: float | None) -> Normalize:
    values = table.values[np.isfinite(table.values)]
    _check_colours(values, vmin, vmax)
    if not log_scale:
        return Normalize(vmin, vmax) if len(values) else Normalize()
    if vmin is not None and vmin <= 0:
        raise ConfigError(f"vmin must be > 0 on a logarithmic scale, got {vmin:g}.")
    positive = values[values > 0]
    if len(positive) == 0:
        raise DataError(f"{table.log_path} has no positive {NAMES[table.metric]} for a logarithmic scale.")
    low, high = vmin or max(float(positive.min()), 1 / MOST_DRAWN), float(positive.max()) if vmax is None else vmax
    return LogNorm(low, high if high > low else low * 1.01)


def _check_colours(values: NDArray[np.float64], vmin: float | None, vmax: float | None) -> None:
    """Reject bounds that would give all values the same color."""
    if len(values) == 0:
        return
    least, most = float(values.min()), float(values.max())
    for name, bound, is_beyond in (("vmin", vmin, "above"), ("vmax", vmax, "below")):
        if bound is not None and (bound > most if is_beyond == "above" else bound < least):
            raise ConfigError(f"{name}={bound:g} is {is_beyond} all values, which are {least:.4g} to {most:.4g}.")


def _label_rows(axes: Axes, table: ParameterTable, height: float) -> None:
    """Label every row as large as it allows; if rows are too low for text, every second, third, ... row."""
    points = height * _POINTS_PER_INCH / max(len(table.parameters), 1) * 0.7
    every = max(1, int(np.ceil(_LEAST_LABEL_SIZE / points)))
    rows = range(0, len(table.parameters), every)
    axes.set_yticks(rows, [plain(short_label(table.parameters[row])) for row in rows])
    axes.tick_params(axis="y", labelsize=min(9.0, max(points, _LEAST_LABEL_SIZE)), colors=TEXT_COLOUR, length=0)


def _label_steps(axes: Axes, table: ParameterTable) -> None:
    """Label all steps, or about twenty if there are many."""
    num = len(table.steps)
    every = 1 if num <= _MANY_STEPS else max(1, num // _STEP_TICKS)
    columns = range(0, num, every)
    labels = [f"{table.steps[column]:,.0f}" for column in columns]
    is_long = sum(map(len, labels)) * 0.09 > axes.figure.get_figwidth() * 0.7  # type: ignore[union-attr]
    axes.set_xticks(columns, labels, rotation=45 if is_long else 0, ha="right" if is_long else "center")
    axes.tick_params(axis="x", labelsize=9.0, colors=TEXT_COLOUR, length=0)
    axes.set_xlabel("step", color=TEXT_COLOUR, fontsize=FONT_SIZE)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _add_bar(figure: Figure, axes: Axes, cells: QuadMesh, name: str) -> None:
    height = figure.get_figheight()
    length = min(0.85 * height, _BAR_LENGTH)
    bar = figure.colorbar(
        cells,
        ax=axes,
        extend=_beyond(cells),
        pad=0.01,
        shrink=length / height,
        aspect=length / _BAR_WIDTH,
        anchor=(0.0, 1.0),
    )
    bar.set_label(name, color=TEXT_COLOUR, fontsize=FONT_SIZE)
    bar.ax.tick_params(colors=TEXT_COLOUR, length=0, labelsize=9.0)
    bar.outline.set_visible(False)


def _beyond(cells: QuadMesh) -> Literal["neither", "both", "min", "max"]:
    """The ends of the color scale that have values beyond them."""
    values = np.asarray(np.ma.asarray(cells.get_array()).compressed(), dtype=np.float64)
    norm = cells.norm
    if norm.vmin is None or norm.vmax is None or len(values) == 0:
        return "neither"
    is_below = values.min() < norm.vmin and not isinstance(norm, LogNorm)  # values that are not positive are gray there
    is_above = values.max() > norm.vmax
    return "both" if is_below and is_above else "min" if is_below else "max" if is_above else "neither"


def _put_title(axes: Axes, table: ParameterTable, title: str | None) -> None:
    name = NAMES[table.metric]
    shown = f"{name[0].upper()}{name[1:]}, {table.log_path.absolute().parent.name}" if title is None else title
    axes.set_title(plain(shown, 90), loc="left", color=TEXT_COLOUR, fontsize=TITLE_SIZE, fontweight="bold")
    missing = int(np.isnan(table.values).sum())
    if missing:
        axes.set_title(f"gray: no value ({missing:,})", loc="right", color=QUIET_COLOUR, fontsize=NOTE_SIZE)
