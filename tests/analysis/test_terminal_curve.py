"""A curve in the terminal has its values where the axes say."""

from __future__ import annotations

import math

import pytest

from onstep.analysis.plots.terminal_curve import terminal_curve

FALLING = [(float(step), 8.0 - step / 25) for step in range(0, 101, 5)]


def dots(line: str) -> set[int]:
    """The columns of a line with a dot."""
    return {column for column, one in enumerate(line) if "\u2801" <= one <= "\u28ff"}


def test_a_falling_loss_runs_from_the_top_left_to_the_bottom_right() -> None:
    lines = terminal_curve(FALLING, width=60, height=8)
    assert len(lines) == 10
    assert all(len(line) <= 60 for line in lines)
    firsts = [min(dots(line)) for line in lines[:8]]
    assert firsts == sorted(firsts)
    assert firsts[0] == 9
    assert max(dots(lines[7])) == 59
    assert lines[0].split()[0] == "8"
    assert lines[7].split()[0] == "4"
    assert lines[9].split() == ["0", "100", "step"]


def test_a_jump_is_joined_and_a_constant_is_a_line() -> None:
    jump = terminal_curve([(0, 0), (1, 1)], width=40, height=5)
    assert all(dots(line) for line in jump[:5])
    flat = terminal_curve([(0, 2), (9, 2)], width=40, height=5)
    assert [bool(dots(line)) for line in flat[:5]] == [False, False, True, False, False]


def test_what_is_not_finite_is_left_out() -> None:
    spoilt = [*FALLING[:3], (11.0, math.nan), (12.0, math.inf), *FALLING[3:]]
    assert terminal_curve(spoilt, width=60, height=8) == terminal_curve(FALLING, width=60, height=8)


@pytest.mark.parametrize(
    ("points", "width", "height"), [([], 80, 8), (FALLING[:1], 80, 8), (FALLING, 20, 8), (FALLING, 80, 2)]
)
def test_what_would_not_be_readable_is_not_drawn(points: list[tuple[float, float]], width: int, height: int) -> None:
    assert terminal_curve(points, width=width, height=height) == []
