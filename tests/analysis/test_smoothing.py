"""Moving means."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onstep.analysis.plots.smoothing import automatic_window, smoothed, spikes


def reference(values: list[float], window: int) -> list[float]:
    """The definition, point by point."""
    means = []
    for index, value in enumerate(values):
        half = min(window // 2, index)
        near = [one for one in values[index - half : index + half + 1] if math.isfinite(one)]
        means.append(sum(near) / len(near) if math.isfinite(value) else value)
    return means


@pytest.mark.parametrize("window", [2, 3, 4, 10, 11, 36, 37])
def test_each_value_becomes_the_mean_of_its_neighbourhood(window: int) -> None:
    values = [math.sin(index) + index / 10 for index in range(37)]
    assert smoothed(values, window) == pytest.approx(reference(values, window))


def test_a_window_of_ten_averages_eleven_points() -> None:
    spike = [0.0] * 40
    spike[20] = 11.0
    assert np.flatnonzero(smoothed(spike, 10)).tolist() == list(range(15, 26))
    assert smoothed(spike, 10)[20] == pytest.approx(1.0)


def test_values_that_are_not_finite_stay_and_count_in_no_mean() -> None:
    values = [1.0, math.nan, 3.0, math.inf, 5.0, 7.0]
    assert smoothed(values, 3) == pytest.approx(reference(values, 3), nan_ok=True)


@pytest.mark.parametrize("window", [0, 1, 4])
def test_no_window_and_one_longer_than_the_values_change_nothing(window: int) -> None:
    assert smoothed([1.0, 5.0, 2.0], window).tolist() == [1.0, 5.0, 2.0]


def test_a_huge_spike_spoils_only_the_means_that_it_belongs_to() -> None:
    values = np.full(1000, 0.1)
    values[300] = 1e20
    means = smoothed(values, 11)
    assert means[400:] == pytest.approx(np.full(600, 0.1))


def test_there_may_be_no_values() -> None:
    assert smoothed([], 3).tolist() == []


def test_only_long_curves_are_smoothed_unasked() -> None:
    assert [automatic_window(num) for num in (0, 39, 40, 1000)] == [1, 1, 3, 40]


def test_a_lone_spike_counts_in_no_mean() -> None:
    values = np.full(200, 2.0) + 0.01 * (np.arange(200) % 5)
    values[77] = 1e20
    left_out = spikes(values, 20)
    assert np.flatnonzero(left_out).tolist() == [77]
    assert smoothed(values, 20, left_out)[2:] == pytest.approx(np.full(198, 2.02), abs=0.01)
    assert not spikes(values, 1).any()


@pytest.mark.parametrize("where", [slice(0, 45), slice(500, 540), slice(960, 1000)])
def test_a_stretch_far_outside_is_no_spike(where: slice) -> None:
    values = np.full(1000, 2.0) + 0.01 * (np.arange(1000) % 5)
    values[where] = 50.0
    assert not spikes(values, 40).any()
    assert smoothed(values, 40, spikes(values, 40))[where].max() > 45


def test_a_smoothed_curve_starts_where_the_data_starts() -> None:
    fast, slow = (5.55 * np.exp(-np.arange(200) / scale) for scale in (5, 50))
    means = [smoothed(curve, automatic_window(200)) for curve in (fast, slow)]
    assert [float(one[0]) for one in means] == [5.55, 5.55]
    assert means[0][1] == pytest.approx(fast[:3].mean())


def test_a_straight_line_stays_one_at_its_start() -> None:
    line = np.arange(100.0, 0.0, -1.0)
    assert smoothed(line, 21)[:90] == pytest.approx(line[:90])


def test_a_huge_first_value_spoils_only_the_means_that_it_belongs_to() -> None:
    values = np.full(100, 0.1)
    values[3] = 1e20
    means = smoothed(values, 21)
    assert means[:2] == pytest.approx([0.1, 0.1])
    assert means[14:] == pytest.approx(np.full(86, 0.1))
