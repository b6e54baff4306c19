"""Draws simulations: the rounds of one, or the efficiency and traffic of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from onstep.analysis.plots.axes import PALETTE, style_axes
from onstep.analysis.plots.output import new_figure
from onstep.config.field_types import is_number
from onstep.diloco.simulator.comparison import Compared
from onstep.diloco.simulator.report import Report

_WIDTH, _HEIGHT = 12.0, 4.5


def draw_report(report: Report) -> Figure:
    """The duration of each round over the time of the run, late and without a quorum marked, and each site's time."""
    figure = new_figure((_WIDTH, _HEIGHT))
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    _draw_rounds(left, report)
    sites = list(report.sites)
    idle = [100 * report.sites[name].idle_share for name in sites]
    right.barh(sites, [100 - one for one in idle], color=PALETTE[0], label="training")
    right.barh(sites, idle, left=[100 - one for one in idle], color=PALETTE[4], label="waiting")
    right.invert_yaxis()
    right.set_xlabel("time of the workers (%)")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=2)
    style_axes(right)
    return figure


def draw_comparison(compared: Sequence[Compared]) -> Figure:
    """Efficiency, and bytes of a worker in an hour, over the first varied key; a line for each choice of the others."""
    figure = new_figure((_WIDTH, _HEIGHT))
    left, right = figure.subplots(1, 2)
    key = next(iter(compared[0].variation.choices))
    for number, label in enumerate(dict.fromkeys(map(_others, compared))):
        several = [one for one in compared if _others(one) == label]
        x = [one.variation.choices[key] for one in several]
        look: dict[str, Any] = {"marker": "o", "color": PALETTE[number % len(PALETTE)], "label": label or None}
        left.plot(_positions(x), [100 * one.report.efficiency for one in several], **look)
        right.plot(_positions(x), [_hourly_gigabytes(one) for one in several], **look)
    for axes in (left, right):
        _label_x(axes, key, [one.variation.choices[key] for one in compared])
        style_axes(axes)
    left.set_ylabel("efficiency (%)")
    left.set_ylim(0, 100)
    right.set_ylabel("sent by a worker (GB per hour)")
    right.set_ylim(bottom=0)
    if len(compared[0].variation.choices) > 1:
        left.legend(frameon=False)
    return figure


def _draw_rounds(axes: Axes, report: Report) -> None:
    groups = [
        ("on time", PALETTE[0], [one for one in report.rounds if not one.late and not one.lacked_quorum]),
        ("with late contributions", PALETTE[4], [one for one in report.rounds if one.late and not one.lacked_quorum]),
        ("waited for a quorum", PALETTE[1], [one for one in report.rounds if one.lacked_quorum]),
    ]
    for label, colour, rounds in groups:
        if rounds:
            hours, seconds = [one.committed_at / 3600 for one in rounds], [one.seconds for one in rounds]
            axes.plot(hours, seconds, ".", color=colour, label=label)
    axes.set_xlabel("time (h)")
    axes.set_ylabel("duration of a round (s)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncols=3)
    style_axes(axes)


def _others(one: Compared) -> str:
    """The choices of all keys but the first."""
    return ", ".join(f"{key} {value}" for key, value in list(one.variation.choices.items())[1:])


def _hourly_gigabytes(one: Compared) -> float:
    hours = max(one.report.seconds / 3600, 1e-9)
    return one.report.bytes_up / one.variation.scenario.total_workers / hours / 1e9


def _positions(values: Sequence[Any]) -> list[float]:
    """Numbers where they are, anything else in equal distances."""
    if all(is_number(value) for value in values):
        return [float(value) for value in values]
    return [float(index) for index in range(len(values))]


def _label_x(axes: Axes, key: str, values: Sequence[Any]) -> None:
    axes.set_xlabel(key)
    distinct = list(dict.fromkeys(values))
    if all(is_number(value) and value > 0 for value in distinct):
        axes.set_xscale("log")
    axes.set_xticks(_positions(distinct), [str(value) for value in distinct])
    axes.minorticks_off()
