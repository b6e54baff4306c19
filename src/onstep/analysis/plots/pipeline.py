"""Draws when each rank of a pipeline computes which pass."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from onstep.analysis.pipeline_traces import Pass, PipelineStep
from onstep.analysis.plots.axes import QUIET_COLOUR, TEXT_COLOUR
from onstep.analysis.plots.output import finish, new_figure

COLOURS = {
    "forward": ("#a9cbe6", "#5f9ecb"),
    "backward": ("#f3c08f", "#dd8a3e"),
    "input gradient": ("#f3c08f", "#dd8a3e"),
    "weight gradient": ("#b5dcbd", "#66b077"),
}
"""Of each part: that of a rank's first stage, and that of its later ones."""
_LEAST_LABELED = 0.008
"""The share of the width that a pass needs for its number."""


def draw_pipeline(axes: Axes, step: PipelineStep, *, width: float | None = None) -> None:
    """Draw a step: a lane for each rank, a box for each pass with the number of its micro-batch.

    Args:
        axes: where.
        step: the passes.
        width: seconds of the whole axis; None for those of the step.
    """
    width = step.seconds if width is None else width
    for lane, passes in enumerate(step.ranks):
        first = min(one.stage for one in passes)
        for one in passes:
            _draw_pass(axes, one, lane, step.begin, width, is_first=one.stage == first)
    axes.set_yticks(range(len(step.ranks)), [f"rank {rank}" for rank in range(len(step.ranks))])
    axes.tick_params(axis="y", length=0, labelcolor=TEXT_COLOUR)
    axes.tick_params(axis="x", labelcolor=QUIET_COLOUR, color=QUIET_COLOUR)
    axes.set_xlim(0, width)
    axes.set_ylim(len(step.ranks) - 0.5, -0.5)
    axes.spines[:].set_visible(False)


def _draw_pass(axes: Axes, one: Pass, lane: int, zero: float, width: float, *, is_first: bool) -> None:
    seconds = one.end - one.begin
    colour = COLOURS[one.part][0 if is_first else 1]
    bar = [(one.begin - zero, seconds)]
    axes.broken_barh(bar, (lane - 0.42, 0.84), facecolors=colour, edgecolors="white", linewidth=0.6)
    if seconds > _LEAST_LABELED * width:
        middle = one.begin - zero + seconds / 2
        axes.text(middle, lane, str(one.micro_batch), ha="center", va="center", fontsize=7, color=TEXT_COLOUR)


def legend_of(steps: Sequence[PipelineStep]) -> list[Patch]:
    """What the colors of some steps mean."""
    passes = [(one, min(other.stage for other in rank)) for step in steps for rank in step.ranks for one in rank]
    drawn = {(one.part, one.stage != first) for one, first in passes}
    has_both = any(is_later for _, is_later in drawn)
    names = {
        "forward": "forward",
        "backward": "backward",
        "input gradient": "gradient of the input",
        "weight gradient": "gradients of weights",
    }
    if {"backward", "input gradient"} <= {part for part, _ in drawn}:
        names["backward"] = "backward, or gradient of the input"
        del names["input gradient"]
    suffixes = (", first stage of a rank", ", second") if has_both else ("",)
    return [
        Patch(facecolor=COLOURS[part][later], label=f"{name}{suffix}")
        for part, name in names.items()
        for later, suffix in enumerate(suffixes)
        if part in {other for other, _ in drawn}
    ]


def typical(steps: Sequence[PipelineStep]) -> PipelineStep:
    """The step whose idle time is the median, without the first if there are several."""
    known = list(steps[1:] or steps)
    middle = statistics.median_low(one.idle for one in known)
    return next(one for one in known if one.idle == middle)


def plot_pipeline(step: PipelineStep, *, title: str | None = None, output_path: str | Path | None = None) -> Figure:
    """Plot a step of a pipeline.

    Args:
        step: the passes.
        title: above the figure; None for none.
        output_path: the image file to write; None writes none.
    """
    figure = new_figure((11, 1.3 + 0.4 * len(step.ranks)))
    axes = figure.add_subplot()
    draw_pipeline(axes, step)
    axes.set_xlabel("seconds", color=QUIET_COLOUR)
    if title is not None:
        axes.set_title(title, loc="left", color=TEXT_COLOUR)
    figure.legend(handles=legend_of([step]), loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return finish(figure, output_path, show=False, dpi=150)
