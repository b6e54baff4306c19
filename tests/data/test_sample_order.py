"""The order of samples is a permutation and a pure function of (seed, epoch, position)."""

from __future__ import annotations

import numpy as np
import pytest

from onstep.data import SampleOrder
from onstep.errors import DataError


@pytest.mark.parametrize("num_samples", [1, 2, 3, 7, 64, 1000, 4096, 4097, 8191, 8192, 8193, 70_001])
def test_each_sample_comes_once(num_samples: int) -> None:
    order = SampleOrder(num_samples, seed=3, epoch=1).indices(0, num_samples)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(num_samples))


@pytest.mark.parametrize("num_samples", [50, 5000, 20_000])
def test_a_slice_is_the_slice_of_the_whole(num_samples: int) -> None:
    order = SampleOrder(num_samples, seed=3, epoch=1)
    whole = order.indices(0, num_samples)
    for start, stop in [(0, 1), (17, 40), (num_samples // 2, num_samples), (num_samples, num_samples)]:
        part = SampleOrder(num_samples, seed=3, epoch=1).indices(start, stop)
        assert np.array_equal(part, whole[start:stop])
    shuffled_positions = np.array([[40, 2], [9, 9]])
    assert np.array_equal(order.at(shuffled_positions), whole[shuffled_positions])


@pytest.mark.parametrize("num_samples", [2000, 20_000])
def test_seeds_and_epochs_give_unrelated_orders(num_samples: int) -> None:
    orders = [SampleOrder(num_samples, seed, epoch).indices(0, num_samples) for seed in (0, 1) for epoch in (0, 1)]
    limit = 5 / num_samples**0.5  # five standard deviations of the rank correlation of two random orders
    for number, order in enumerate(orders):
        for other in [np.arange(num_samples), *orders[:number]]:
            assert abs(np.corrcoef(order, other)[0, 1]) < limit
            assert (order == other).sum() < 10


@pytest.mark.parametrize("num_samples", [3000, 5000, 33_000])
def test_neighbours_are_torn_apart_and_every_part_is_mixed(num_samples: int) -> None:
    order = SampleOrder(num_samples, seed=0, epoch=0).indices(0, num_samples)
    assert (np.abs(np.diff(order)) == 1).sum() < 15  # 2 are expected
    # Each tenth of the epoch takes about a tenth from each tenth of the dataset.
    counts, _, _ = np.histogram2d(np.arange(num_samples), order, bins=10)
    expected = num_samples / 100
    assert ((counts - expected) ** 2 / expected).sum() < 180  # chi-square of 81 degrees of freedom: mean 81, sigma 13


def test_the_order_stays_what_it_was_in_earlier_releases() -> None:
    """A saved position means nothing if the order changes: these numbers may not change."""
    assert SampleOrder(10, seed=1234, epoch=0).indices(0, 10).tolist() == [2, 0, 7, 5, 6, 4, 8, 3, 9, 1]
    assert SampleOrder(10_000, seed=1234, epoch=2).indices(500, 506).tolist() == [2723, 3295, 6714, 9124, 6593, 2176]


def test_unshuffled_is_the_identity() -> None:
    assert SampleOrder(9, seed=5, epoch=5, shuffle=False).indices(2, 6).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("shuffle", [True, False])
def test_positions_outside_the_epoch_are_refused(shuffle: bool) -> None:
    with pytest.raises(DataError, match="positions 8 to 10 are outside an epoch of 10"):
        SampleOrder(10, seed=0, epoch=0, shuffle=shuffle).indices(8, 11)
    with pytest.raises(DataError, match="got -1"):
        SampleOrder(-1, seed=0, epoch=0)
