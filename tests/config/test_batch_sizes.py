"""The global batch as a function of consumed samples, against the formula that Megatron states, step by step."""

from __future__ import annotations

import math

import pytest

from onstep.config import ConfigContainer, resolve, validate
from onstep.config.checks import batches
from onstep.config.lengths import (
    BatchSizes,
    batch_sizes,
    parse_steps,
    ramp,
    steps_of_rampup_epochs,
    train_iters,
    warmup_and_decay,
)
from onstep.errors import ConfigError


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


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"global_batch_size": 32, "rampup_batch_size": [8, 5, 100]}, ["rampup_batch_size=[8, 5, 100]", "28 or 33"]),
        ({"global_batch_size": 32, "rampup_batch_size": [8, 4]}, ["[start, increment, samples]"]),
        ({"global_batch_size": 32, "rampup_batch_size": [0, 4, 100]}, ["start must be > 0, got 0"]),
        ({"global_batch_size": 8, "rampup_batch_size": [16, 4, 100]}, ["global_batch_size=8", "got 16"]),
        ({"global_batch_size": 32, "rampup_batch_size": [2, 2, 5]}, ["15 increments within 5 samples"]),
        ({"rampup_batch_size": [8, 4, 100]}, ["requires train.global_batch_size"]),
        (
            {"global_batch_size": 32, "rampup_batch_size": [3, 29, 100]},
            ["rampup_batch_size=[3, 29, 100] has steps of 3 samples; 3 must be a multiple of micro_batch_size * ranks"],
        ),
        (
            {"global_batch_size": 8, "rampup_batch_size": [4, 4, 9], "step_batch_size_schedule": "0:4 9:8"},
            ["rampup_batch_size and train.step_batch_size_schedule", "keep one"],
        ),
        ({"step_batch_size_schedule": "0:4 5:8 5:16"}, ["increasing thresholds, got 0, 5, 5"]),
        ({"step_batch_size_schedule": "0:4 5:8 3:16"}, ["increasing thresholds"]),
        ({"step_batch_size_schedule": "10:4"}, ["begin with the threshold 0, got 10"]),
        ({"step_batch_size_schedule": "0:8 10:4"}, ["never shrink, got 8, 4"]),
        ({"step_batch_size_schedule": "0:2 1.5:8"}, ["threshold 1.5", "integer number of samples", "1 or 2"]),
        ({"step_batch_size_schedule": "0:2 0.0015Ktok:8"}, ["0.0015Ktok", "integer number of tokens"]),
        ({"global_batch_size": 8, "rampup_batch_size": [8, 4, 100]}, ["global_batch_size=8 and ramps nothing up"]),
        (
            {"global_batch_size": 8, "rampup_batch_size": [2, 2, 60], "train_iters": None, "train_samples": 1},
            ["train_samples=1 is less than the first step of 2 samples"],
        ),
        ({"step_batch_size_schedule": "0:8 ten:16"}, ["'0:8 ten:16'", "'0:32 100K:64 1M:128'"]),
        ({"step_batch_size_schedule": ""}, ["thresholds and sizes"]),
        ({"step_batch_size_schedule": "0:4 9:8", "global_batch_size": 16}, ["ends at 8", "global_batch_size=16"]),
        ({"step_batch_size_schedule": "0:4 9:8", "micro_batch_size": None}, ["requires train.micro_batch_size"]),
        ({"step_batch_size_schedule": "0:3 9:8"}, ["3 must be a multiple"]),
        ({"global_batch_size": 15}, ["must be a multiple of micro_batch_size * ranks"]),
        ({"global_batch_size": 1, "decrease_batch_size_if_needed": True}, ["would leave nothing"]),
        ({"iterations_to_skip": [0]}, ["iterations_to_skip holds 0", "counted from 1"]),
        ({"empty_unused_memory_level": 3}, ["empty_unused_memory_level=3", "0 (never), 1"]),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(train: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        validate(config(**train))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(
    ("profiling", "words"),
    [
        ({"use_pytorch_profiler": True, "use_nsys_profiler": True}, ["a process has one profiler"]),
        ({"use_pytorch_profiler": True, "profile_step_start": 12}, ["profile_step_end=12 must be after"]),
        ({"profile_ranks": [-1]}, ["profile_ranks=[-1]"]),
        ({"use_pytorch_profiler": True, "profile_ranks": [0, 4]}, ["profile_ranks=[0, 4] has the rank 4", "0 to 0"]),
        ({"record_memory_history": True, "profile_ranks": [1]}, ["has the rank 1"]),
    ],
)
def test_profiles_that_cannot_be_are_refused(profiling: dict[str, object], words: list[str]) -> None:
    made = config(global_batch_size=4)
    for name, value in profiling.items():
        setattr(made.profiling, name, value)
    with pytest.raises(ConfigError) as refusal:
        validate(made)
    assert all(word in str(refusal.value) for word in words), refusal.value


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
