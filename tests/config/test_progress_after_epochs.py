"""The expected progress of a run after some steps, against walking through its epochs step by step."""

from __future__ import annotations

import pytest

from onstep.config.lengths import BatchSizes, ExpectedProgress, parse_steps, progress_after, ramp


def walked(sizes: BatchSizes, num_samples: int, drop_last: bool, steps: int) -> list[ExpectedProgress]:
    """Where a run stands before each of its first steps."""
    whole = consumed = epoch = in_epoch = 0
    met = []
    for _ in range(steps):
        met.append(ExpectedProgress(whole, consumed, epoch + in_epoch / num_samples))
        size = sizes.at(consumed)
        taken = min(size, num_samples - in_epoch)
        whole, consumed, in_epoch = whole + size, consumed + taken, in_epoch + taken
        left = num_samples - in_epoch
        if left == 0 or (drop_last and left < sizes.at(consumed)):
            epoch, in_epoch = epoch + 1, 0
    return met


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("num_samples", [20, 23, 47, 500])
@pytest.mark.parametrize(
    "stages", [ramp([4, 4, 90], 20), ramp([2, 2, 400], 8), parse_steps("0:4 40:8 1K:12", 1), ((0,), (8,))]
)
def test_it_is_where_walking_step_by_step_comes_to(
    stages: tuple[tuple[int, ...], tuple[int, ...]], num_samples: int, drop_last: bool
) -> None:
    sizes = BatchSizes(*stages)
    for step, expected in enumerate(walked(sizes, num_samples, drop_last, 200)):
        found = progress_after(step, sizes, num_samples, drop_last)
        assert (found.whole, found.consumed) == (expected.whole, expected.consumed), step
        assert found.epochs == pytest.approx(expected.epochs), step


def test_epochs_without_a_tail_count_as_whole_steps_do() -> None:
    sizes = BatchSizes(*ramp([4, 4, 90], 20))
    assert [progress_after(step, sizes, 47, True).whole for step in range(60)] == [
        sizes.samples_after(step) for step in range(60)
    ]


def test_a_long_run_over_a_short_dataset_is_not_walked_through() -> None:
    """A billion epochs: this would not end if it went from one to the next."""
    sizes = BatchSizes(*ramp([2, 2, 10**12], 8))
    assert progress_after(5 * 10**9, sizes, 9, False) == ExpectedProgress(10 * 10**9, 9 * 10**9, 1e9)
