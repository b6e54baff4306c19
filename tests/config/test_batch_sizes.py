"""The global batch as a function of consumed samples, and the progress that follows, against walking step by step."""

from __future__ import annotations

import math

import pytest

from onstep.config import ConfigContainer, resolve, validate
from onstep.config.checks import batches
from onstep.config.lengths import (
    BatchSizes,
    ExpectedProgress,
    batch_sizes,
    parse_steps,
    progress_after,
    ramp,
    steps_of_rampup_epochs,
    train_iters,
    warmup_and_decay,
)


def config(**train: object) -> ConfigContainer:
    made = ConfigContainer()
    made.optimizer.lr, made.train.micro_batch_size, made.train.train_iters = 1e-3, 2, 100
    for name, value in train.items():
        setattr(made.train, name, value)
    return made


def walk(sizes: BatchSizes, steps: int) -> list[int]:
    """The sizes of the first steps, one after the other."""
    consumed, met = 0, []
    for _ in range(steps):
        met.append(sizes.at(consumed))
        consumed += met[-1]
    return met


def test_a_ramp_has_the_sizes_of_megatrons_formula_at_every_number_of_samples() -> None:
    start, increment, samples, last = 8, 4, 100, 32
    sizes = BatchSizes(*ramp([start, increment, samples], last))
    per_increment = samples / ((last - start) // increment)
    for consumed in range(2 * samples):
        expected = last if consumed > samples else start + int(consumed / per_increment) * increment
        assert sizes.at(consumed) == expected, consumed


def test_a_ramp_without_increments_is_constant() -> None:
    sizes = BatchSizes(*ramp([8, 4, 100], 8))
    assert not sizes.varies
    assert walk(sizes, 3) == [8, 8, 8]


def test_steps_hold_from_their_threshold_on() -> None:
    sizes = BatchSizes(*parse_steps("0:32 1K:64 1.5K:128", seq_length=10))
    assert [sizes.at(at) for at in (0, 999, 1000, 1499, 1500, 10**9)] == [32, 32, 64, 64, 128, 128]


def test_a_threshold_in_tokens_holds_once_they_are_reached() -> None:
    starts, _ = parse_steps("0:2 1Ktok:4 1MTOK:8", seq_length=300)
    assert starts == (0, math.ceil(1000 / 300), math.ceil(10**6 / 300))


def test_lengths_are_those_of_walking_step_by_step() -> None:
    sizes = BatchSizes(*ramp([4, 4, 90], 20))
    met = walk(sizes, 60)
    for steps in range(60):
        assert sizes.samples_after(steps) == sum(met[:steps])
    for start in (0, sum(met[:3]), sum(met[:20])):
        for length in range(0, 200, 7):
            consumed, steps = start, 0
            while consumed + sizes.at(consumed) <= start + length:
                consumed, steps = consumed + sizes.at(consumed), steps + 1
            assert sizes.whole_steps(start, length) == (steps, consumed - start)


def test_a_run_by_samples_ends_before_the_step_that_would_exceed_them() -> None:
    made = config(train_iters=None, train_samples=100, global_batch_size=16, rampup_batch_size=[4, 4, 48])
    sizes = walk(batch_sizes(made.train, 1, 256), 50)
    expected = next(steps for steps in range(50) if sum(sizes[: steps + 1]) > 100)
    assert train_iters(resolve(made)) == expected


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("epochs", [1.0, 2.0, 2.5, 5.0])
def test_epochs_of_growing_batches_have_the_steps_of_walking_through_them(epochs: float, drop_last: bool) -> None:
    sizes, samples = BatchSizes(*ramp([4, 4, 90], 20)), 47
    consumed = steps = 0
    for epoch in range(math.ceil(epochs)):
        in_epoch = left = 0
        left = samples
        while left >= sizes.at(consumed) or (left > 0 and not drop_last):
            taken = min(left, sizes.at(consumed))
            consumed, left, in_epoch = consumed + taken, left - taken, in_epoch + 1
        steps += in_epoch if epochs - epoch >= 1 else math.ceil((epochs - epoch) * in_epoch)
    assert steps_of_rampup_epochs(epochs, samples, sizes, drop_last) == steps


def test_a_rounded_size_is_what_steps_take() -> None:
    made = resolve(config(global_batch_size=15, decrease_batch_size_if_needed=True), world_size=3)
    sizes = batch_sizes(made.train, 3, 256)
    assert (sizes.nominal_at(0), sizes.at(0)) == (15, 12)
    assert made.validation.eval_global_batch_size == 12


def test_the_last_size_of_a_schedule_is_the_global_batch() -> None:
    assert resolve(config(step_batch_size_schedule="0:4 100:8")).train.global_batch_size == 8


def test_a_decay_in_samples_is_as_long_as_the_run() -> None:
    made = resolve(config(train_iters=None, train_samples=200, global_batch_size=16, rampup_batch_size=[4, 4, 48]))
    iters = train_iters(made)
    assert iters is not None
    assert warmup_and_decay(made, iters)[1] == sum(walk(batch_sizes(made.train, 1, 256), iters))


def test_ranks_that_are_there_or_do_not_profile_are_no_mistake() -> None:
    made = config(global_batch_size=8)
    made.profiling.profile_ranks = [0, 3]
    validate(made)
    made.profiling.use_pytorch_profiler = True
    validate(made, world_size=4)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        (
            {"global_batch_size": 8, "rampup_batch_size": [2, 2, 60], "train_iters": 10},
            r"last step has 2 samples and not train.global_batch_size=8",
        ),
        (
            {"global_batch_size": 8, "rampup_batch_size": [2, 2, 60], "train_iters": None, "train_samples": 60},
            r"last step has 6 samples",
        ),
        ({"train_iters": 4, "iterations_to_skip": [9, 2, 5]}, r"has the step 5, but the run has 4 steps"),
    ],
)
def test_what_the_run_does_not_come_to_is_reported(
    monkeypatch: pytest.MonkeyPatch, train: dict[str, object], words: str
) -> None:
    monkeypatch.setattr(batches, "_warned", set())
    with pytest.warns(UserWarning, match=words) as calls:
        resolve(resolve(config(**train)))
    assert len(calls) == 1, "a run checks its configuration more than once"


def test_a_ramp_and_a_skipped_step_that_the_last_step_comes_to_are_not_reported() -> None:
    """17 steps of 2, 4 and 6 samples take 60, the 18th has 8."""
    sizes = batch_sizes(config(global_batch_size=8, rampup_batch_size=[2, 2, 60]).train, 1, 256)
    last = walk(sizes, 30).index(8) + 1
    resolve(config(global_batch_size=8, rampup_batch_size=[2, 2, 60], train_iters=last, iterations_to_skip=[last]))


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
