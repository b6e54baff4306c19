"""Long curves: fewer points, the same picture."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onstep.analysis.plots.smoothing import column_means, downsampled_rows


def downsample(x: np.ndarray, y: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    rows = downsampled_rows(x, y, columns)
    return x[rows], y[rows]


@pytest.fixture
def long() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = np.sort(rng.uniform(0, 1000, 50_000))
    return x, rng.normal(size=50_000)


def test_a_short_curve_stays_as_it_is() -> None:
    x = np.arange(40.0)
    assert downsample(x, x, columns=10)[0] is not None
    assert downsample(x, x, columns=10)[0].tolist() == x.tolist()


def test_every_spike_and_both_ends_stay(long: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = long
    y[12_345], y[40_000] = 99.0, -99.0
    thin_x, thin_y = downsample(x, y, columns=100)
    assert len(thin_x) <= 500
    assert (thin_y.max(), thin_y.min()) == (99.0, -99.0)
    assert thin_x[thin_y.argmax()] == x[12_345]
    assert (thin_x[0], thin_x[-1], thin_y[0], thin_y[-1]) == (x[0], x[-1], y[0], y[-1])


def test_each_column_keeps_its_lowest_and_highest_value(long: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = long
    column, (thin_x, thin_y) = np.floor((x - x[0]) / (x[-1] - x[0]) * 20), downsample(x, y, columns=20)
    thin_column = np.floor((thin_x - x[0]) / (x[-1] - x[0]) * 20)
    for index in range(20):
        whole, kept = y[column == index], thin_y[thin_column == index]
        assert (kept.min(), kept.max()) == (whole.min(), whole.max())


def test_gaps_stay_gaps_and_whole_columns_of_them(long: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = long
    y[(x > 300) & (x < 500)] = math.nan
    y[1234] = math.nan
    thin_x, thin_y = downsample(x, y, columns=100)
    assert not np.isfinite(thin_y[(thin_x > 310) & (thin_x < 490)]).any()
    assert np.isnan(thin_y[thin_x == x[1234]]).tolist() == [True]
    assert np.isnan(downsample(x, np.full(len(x), math.nan), columns=10)[1]).all()


def test_points_that_all_stand_at_one_place_keep_their_range() -> None:
    y = np.arange(1000.0)
    assert sorted(downsample(np.ones(1000), y, columns=10)[1].tolist()) == [0.0, 999.0]


def test_means_of_columns_are_means_of_what_is_finite() -> None:
    y = np.arange(12.0)
    y[4:8] = math.nan
    y[8] = math.nan
    x, means = column_means(np.arange(12.0), y, 3)
    assert x.tolist() == [1.5, 5.5, 9.5]
    assert means == pytest.approx([1.5, math.nan, 10.0], nan_ok=True)
