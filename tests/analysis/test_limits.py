"""How high a picture is where a few points lie far outside."""

from __future__ import annotations

import math

import numpy as np
import pytest

from onstep.analysis.plots.smoothing import bulk_limits, outlier_limits


def test_far_outliers_leave_the_percentiles_with_room() -> None:
    values = np.concatenate([np.linspace(1, 2, 1000), [50.0, -50.0]])
    low, high = np.percentile(values, [5, 95])
    assert outlier_limits([values]) == pytest.approx((low - 0.05 * (high - low), high + 0.15 * (high - low)))


def test_a_side_without_outliers_shows_all_of_it() -> None:
    values = np.array([3.8, 3.0, 2.6, 2.4, 2.3, 2.2, 2.15, 2.1])
    low, high = outlier_limits([values]) or (math.nan, math.nan)
    assert low < 2.1 < 3.8 < high < 4.0


def test_the_end_of_a_loss_that_falls_on_is_not_cut_off() -> None:
    values = np.concatenate([np.linspace(2.0, 1.0, 960), np.linspace(1.0, 0.6, 40)])
    low, _ = outlier_limits([values]) or (math.nan, math.nan)
    assert np.percentile(values, 5) - 0.05 > 0.6 > low


def test_several_series_get_the_union() -> None:
    one, other = np.linspace(1, 2, 100), np.linspace(5, 9, 100)
    low, high = outlier_limits([one, other]) or (math.nan, math.nan)
    assert (low, high) == (outlier_limits([one])[0], outlier_limits([other])[1])  # type: ignore[index]


def test_what_is_not_finite_has_no_say() -> None:
    values = np.linspace(1, 2, 100)
    spoiled = np.concatenate([values, [math.nan, math.inf, -math.inf]])
    assert outlier_limits([spoiled]) == outlier_limits([values])


@pytest.mark.parametrize("series", [[], [np.array([])], [np.array([math.nan])], [np.ones(5)]])
def test_there_are_no_limits_without_a_span(series: list[np.ndarray]) -> None:
    assert outlier_limits(series) is None


def test_a_constant_has_limits_of_its_own() -> None:
    assert bulk_limits(np.full(5, 3e-4)) == (3e-4, 3e-4)
    assert bulk_limits(np.array([math.nan])) is None
