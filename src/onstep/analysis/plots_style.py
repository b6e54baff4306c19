"""The look of all figures: colours that the colour-blind tell apart, quiet axes, short numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import Formatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

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
"""One colour a run: Okabe and Ito's, filled up from Paul Tol's."""
TRAINING_COLOUR, VALIDATION_COLOUR, RATE_COLOUR = "#0072B2", "#009E73", "#E69F00"
_DASHES: tuple[Dash, ...] = ("-", "--", ":")
"""The palette begins again with the next of these."""
TEXT_COLOUR, QUIET_COLOUR, GRID_COLOUR = "#222222", "#767676", "#e6e6e6"
FONT_SIZE, TITLE_SIZE, NOTE_SIZE = 11.0, 13.0, 9.0
LABEL_LENGTH = 60
"""Characters of a label that a legend shows."""
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"))


@dataclass(frozen=True)
class Look:
    """How one run is drawn."""

    colour: str
    dash: Dash = "-"


def look_of(index: int) -> Look:
    """The look of the run with that place in the list."""
    return Look(PALETTE[index % len(PALETTE)], _DASHES[index // len(PALETTE) % len(_DASHES)])


def plain(text: str, length: int | None = None) -> str:
    """A text from a log as matplotlib shows it as it is: no formula, no line break, at most `length` characters."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    if length is not None and len(printable) > length:
        tail = (length - 3) * 2 // 3
        printable = f"{printable[: length - 3 - tail]}...{printable[len(printable) - tail :]}"
    return printable.replace("$", r"\$")


class ShortNumbers(Formatter):
    """Tick labels: thousands separators, or K, M, G from `si_from` on; 3e-4 below a thousandth."""

    def __init__(self, si_from: float = 1e6) -> None:
        self._si_from = si_from

    def __call__(self, x: float, pos: int | None = None) -> str:
        return self.format_ticks([x])[0]

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        """One label a tick, with as many decimals as tell neighbours apart."""
        greatest = max((abs(value) for value in values), default=0.0)
        gaps = [abs(after - before) for before, after in pairwise(values) if after != before]
        if greatest >= self._si_from:
            unit, letter = next((unit, letter) for unit, letter in _SI if greatest >= unit)
            gap = min(gaps, default=greatest) / unit
            return [f"{_decimal(value / unit, gap)}{letter}" if value else "0" for value in values]
        if 0 < greatest < 1e-2 and min(gaps, default=greatest) < 1e-3:
            return [_exponential(value) for value in values]
        return [_decimal(value, min(gaps, default=greatest)) for value in values]


class LogNumbers(ShortNumbers):
    """Tick labels of a logarithmic axis: each in its own unit."""

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        return [_exponential(value) if 0 < abs(value) < 1e-3 or abs(value) >= 1e5 else f"{value:g}" for value in values]


def style_axes(axes: Axes) -> None:
    """Take away what is not data, and keep a faint grid."""
    axes.tick_params(colors=TEXT_COLOUR, length=0, labelsize=FONT_SIZE - 1)
    axes.grid(color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#b0b0b0")


def number_axis(axis: Axis, *, is_integer: bool = False, si_from: float = 1e6) -> None:
    """Few round ticks with short labels."""
    least = 1 if is_integer else 2  # of a single step there is one tick, and none between two
    locator = MaxNLocator("auto", integer=is_integer, min_n_ticks=least, steps=[1, 2, 2.5, 5, 10])
    axis.set_major_locator(locator)
    axis.set_major_formatter(ShortNumbers(si_from))


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Ticks of a logarithmic axis that shows `low` to `high`: also where these are less than a decade apart."""
    decades = math.log10(high / low) if 0 < low < high else 1.0
    if decades < 0.7:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 4 else (1,)))
    axis.set_major_formatter(LogNumbers())
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def _decimal(value: float, gap: float) -> str:
    """With the decimals that a step of `gap` needs."""
    decimals = max(0, min(6, math.ceil(-math.log10(gap) - 1e-9))) if gap > 0 else 0
    if gap > 0 and decimals < 6 and not _is_whole(gap * 10**decimals):
        decimals += 1  # steps of 0.25
    text = f"{value:,.{decimals}f}"
    return text.lstrip("-") if float(text.replace(",", "")) == 0 else text


def _is_whole(value: float) -> bool:
    return abs(value - round(value)) < 1e-6 * max(1.0, abs(value))


def _exponential(value: float) -> str:
    """3e-4 instead of 0.0003."""
    if value == 0:
        return "0"
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"
