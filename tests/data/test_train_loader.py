"""Which samples a step takes: the same for every split of a global batch and from every position on."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from onstep.data import StepBatches, TrainLoader
from onstep.errors import DataError


class Numbers:
    """Sample i is {"x": tensor(i)}."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index)}


class NumbersAtOnce(Numbers):
    """Reads several samples at once, as `datasets` does."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        raise AssertionError("several samples should be read at once")

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]]:
        return [{"x": torch.tensor(i)} for i in indices]


class FailsOnce(Numbers):
    """Fails the first time that its sample 5 is read."""

    has_failed = False

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == 5 and not self.has_failed:
            self.has_failed = True
            raise OSError("disk")
        return super().__getitem__(index)


def loaders(
    num_samples: int, micro: int, world: int, global_batch: int, dataset_type: type[Numbers] = Numbers, **options: Any
) -> list[TrainLoader]:
    return [
        TrainLoader(
            dataset_type(num_samples),
            micro_batch_size=micro,
            global_batch_size=global_batch,
            rank=rank,
            world_size=world,
            seed=7,
            **options,
        )
        for rank in range(world)
    ]


def epoch_steps(ranks: list[TrainLoader], num_microbatches: int) -> Iterator[list[StepBatches]]:
    """The steps up to the end of the epoch, each as a list over ranks."""
    while True:
        steps = [loader.read(num_microbatches) for loader in ranks]
        if None in steps:
            assert steps == [None] * len(ranks)
            return
        yield [step for step in steps if step is not None]


def ids_of(steps: list[StepBatches]) -> list[int]:
    """The sample ids of one step in the order of the epoch: row by row, in a row rank by rank."""
    rows = zip(*[step.sample_ids or [] for step in steps], strict=True)
    return [i for row in rows for ids in row for i in ids]


def check_batches_match_ids(step: StepBatches) -> None:
    assert step.sample_ids is not None
    for batch, ids, is_filler in zip(step.micro_batches, step.sample_ids, step.is_filler, strict=True):
        if is_filler:
            assert (ids, len(batch["x"])) == ([], 1)
        else:
            assert batch["x"].tolist() == ids


GRID = [
    *itertools.product([1, 2, 4], [1, 2, 3], [1, 2], [True, False], [0]),
    (1, 2, 2, True, 2),
    (2, 3, 1, False, 2),
]


@pytest.mark.parametrize(("world", "micro", "accumulation", "drop_last", "num_workers"), GRID)
def test_an_epoch_takes_each_sample_once(
    world: int, micro: int, accumulation: int, drop_last: bool, num_workers: int
) -> None:
    num_samples = 61
    global_batch = world * micro * accumulation
    ranks = loaders(num_samples, micro, world, global_batch, drop_last=drop_last, num_workers=num_workers)
    taken: Counter[int] = Counter()
    num_steps = 0
    for steps in epoch_steps(ranks, accumulation):
        for step in steps:
            check_batches_match_ids(step)
        ids = ids_of(steps)
        assert {step.num_samples for step in steps} == {len(ids)}
        taken.update(ids)
        num_steps += 1
    assert set(taken.values()) == {1}
    num_dropped = num_samples % global_batch if drop_last else 0
    assert len(taken) == num_samples - num_dropped
    assert num_steps == ranks[0].steps_per_epoch(accumulation)
    assert [(loader.epoch, loader.samples_in_epoch) for loader in ranks] == [(1, 0)] * world


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_step_takes_the_same_samples_however_the_global_batch_is_split(drop_last: bool) -> None:
    splits = [
        (world, micro, 12 // (world * micro))
        for world in (1, 2, 3, 4)
        for micro in (1, 2, 3)
        if 12 % (world * micro) == 0
    ]
    assert len(splits) > 8
    streams = []
    for world, micro, accumulation in splits:
        ranks = loaders(47, micro, world, 12, drop_last=drop_last)
        streams.append([ids_of(steps) for _ in range(2) for steps in epoch_steps(ranks, accumulation)])
    assert all(stream == streams[0] for stream in streams)
    assert len(streams[0]) == (6 if drop_last else 8)


def test_workers_do_not_change_the_samples() -> None:
    here, there = loaders(30, 4, 1, 4)[0], loaders(30, 4, 1, 4, num_workers=2)[0]
    for _ in range(9):  # past the end of the epoch
        step, other = here.read(1), there.read(1)
        assert (step and step.sample_ids) == (other and other.sample_ids)
        if other is not None:
            check_batches_match_ids(other)
    there.close()


@pytest.mark.parametrize("drop_last", [True, False])
def test_continuing_at_any_position_gives_the_uninterrupted_tail(drop_last: bool) -> None:
    loader = loaders(43, 3, 1, 6, drop_last=drop_last)[0]
    history: list[tuple[dict[str, Any], list[list[int]] | None]] = []
    for _ in range(18):
        state = loader.state_dict()
        step = loader.read(2)
        history.append((state, step and step.sample_ids))
    assert sum(ids is None for _, ids in history) == 2
    for number, (state, _) in enumerate(history):
        again = loaders(43, 3, 1, 6, drop_last=drop_last)[0]
        again.load_state_dict(state)
        assert again.state_dict() == state
        for _, ids in history[number : number + 4]:
            step = again.read(2)
            assert (step and step.sample_ids) == ids


def test_a_position_saved_with_another_batch_size_is_continued_sample_by_sample() -> None:
    whole = [i for steps in epoch_steps(loaders(43, 1, 1, 1), 1) for i in ids_of(steps)]
    for start in range(44):
        ranks = loaders(43, 3, 2, 6, drop_last=False, samples_in_epoch=start)
        assert [i for steps in epoch_steps(ranks, 1) for i in ids_of(steps)] == whole[start:]
        ranks = loaders(43, 3, 2, 6, samples_in_epoch=start)
        num_full = (43 - start) // 6 * 6
        assert [i for steps in epoch_steps(ranks, 1) for i in ids_of(steps)] == whole[start : start + num_full]


def test_a_position_counts_what_was_handed_out_not_what_workers_read_ahead() -> None:
    loader = loaders(64, 4, 1, 4, num_workers=1)[0]
    step = loader.read(1)
    assert step is not None
    assert loader.state_dict() == {"epoch": 0, "samples_in_epoch": 4}
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("persistent", [False, True])
def test_seeking_back_and_forth_reads_from_there(num_workers: int, persistent: bool) -> None:
    options = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
    loader, reference = loaders(64, 4, 1, 4, **options)[0], loaders(64, 4, 1, 4)[0]
    for epoch, samples in [(0, 8), (0, 0), (3, 60), (1, 12)]:
        loader.seek(epoch, samples)
        reference.seek(epoch, samples)
        for _ in range(2):
            step, expected = loader.read(1), reference.read(1)
            assert (step and step.sample_ids) == (expected and expected.sample_ids)
            if step is not None:
                check_batches_match_ids(step)
    loader.close()


def test_the_start_of_a_run_reads_nothing_before_its_position() -> None:
    read: list[int] = []

    class Recording(Numbers):
        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            read.append(index)
            return super().__getitem__(index)

    (loader,) = loaders(10**12, 2, 1, 2, Recording, samples_in_epoch=10**12 - 4)
    step = loader.read(1)
    assert step is not None
    assert step.sample_ids == [read]


def test_steps_of_different_sizes_read_one_stream() -> None:
    loader, reference = loaders(40, 2, 1, 2)[0], loaders(40, 2, 1, 2)[0]
    whole = [i for steps in epoch_steps([reference], 1) for i in ids_of(steps)]
    taken: list[int] = []
    for size in (1, 3, 2, 5, 1):
        step = loader.read(size)
        assert step is not None
        taken += ids_of([step])
    assert taken == whole[:24]


def test_a_tail_gives_every_rank_equally_many_micro_batches() -> None:
    # 21 samples: a step of 16, then 5 left of rows of 8 = 4 ranks * 2.
    ranks = loaders(21, 2, 4, 16, drop_last=False, shuffle=False)
    list(itertools.islice(epoch_steps(ranks, 2), 1))
    tail = [loader.read(2) for loader in ranks]
    assert [step and step.sample_ids for step in tail] == [[[16, 17]], [[18, 19]], [[20]], [[]]]
    assert [step and step.is_filler for step in tail] == [[False], [False], [False], [True]]
    assert [step and step.local_samples for step in tail] == [[2], [2], [1], [0]]
    assert [step and step.num_samples for step in tail] == [5] * 4
    filler = tail[3]
    assert filler is not None
    assert filler.num_filler == 1
    assert filler.micro_batches[0]["x"].tolist() == [16]
    assert ranks[3].samples_in_epoch == 21


def test_epochs_differ_and_seeds_differ() -> None:
    loader = loaders(40, 4, 1, 4)[0]
    first, second = ([ids_of(steps) for steps in epoch_steps([loader], 1)] for _ in range(2))
    other = TrainLoader(Numbers(40), micro_batch_size=4, global_batch_size=4, seed=8)
    third = [ids_of(steps) for steps in epoch_steps([other], 1)]
    assert first != second
    assert first != third


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torchs_global_random_state_is_left_alone(num_workers: int) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    loader = loaders(16, 2, 1, 2, num_workers=num_workers)[0]
    for _ in epoch_steps([loader], 1):
        pass
    loader.read(1)
    loader.close()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("persistent", [False, True])
def test_close_ends_the_workers(persistent: bool) -> None:
    loader = loaders(64, 2, 1, 2, num_workers=2, persistent_workers=persistent)[0]
    loader.read(1)
    assert len(multiprocessing.active_children()) == 2
    loader.close()
    gc.collect()
    assert multiprocessing.active_children() == []
    step = loader.read(1)
    assert step is not None
    assert step.sample_ids == loaders(64, 2, 1, 2, samples_in_epoch=2)[0].read(1).sample_ids  # type: ignore[union-attr]
    loader.close()


def test_persistent_workers_are_kept_over_epochs() -> None:
    loader = loaders(8, 2, 1, 2, num_workers=1, persistent_workers=True)[0]
    processes = set()
    for _ in range(3):
        for _ in epoch_steps([loader], 1):
            processes |= {child.pid for child in multiprocessing.active_children()}
    loader.close()
    assert len(processes) == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_several_samples_are_read_at_once_where_the_dataset_can(num_workers: int) -> None:
    loader = loaders(8, 4, 1, 4, NumbersAtOnce, num_workers=num_workers)[0]
    step = loader.read(2)
    assert step is not None
    check_batches_match_ids(step)
    loader.close()


def test_a_collator_takes_the_samples() -> None:
    loader = loaders(8, 4, 1, 4, collate_fn=lambda samples: [int(s["x"]) for s in samples])[0]
    step = loader.read(1)
    assert step is not None
    assert step.micro_batches == step.sample_ids


@pytest.mark.parametrize("num_workers", [0, 1])
def test_after_an_error_while_reading_the_same_step_is_read_again(num_workers: int) -> None:
    loader = loaders(
        16, 2, 1, 8, FailsOnce, shuffle=False, num_workers=num_workers, persistent_workers=num_workers > 0
    )[0]
    with pytest.raises(OSError, match="disk"):
        loader.read(4)
    assert loader.state_dict() == {"epoch": 0, "samples_in_epoch": 0}
    step = loader.read(4)
    assert step is not None
    assert step.sample_ids == [[0, 1], [2, 3], [4, 5], [6, 7]]
    check_batches_match_ids(step)
    loader.close()


BAD_SIZES = [
    ({"micro_batch_size": 0}, "micro_batch_size must be >= 1, got 0"),
    ({"global_batch_size": 6}, r"multiple of micro_batch_size \* world_size = 4 \* 1 = 4, got 6; the nearest is 8"),
    ({"global_batch_size": 0}, "got 0; the nearest is 4"),
    ({"global_batch_size": 64}, "has 20 samples, fewer than one global batch of 64.*drop_last=False"),
    ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
    ({"num_workers": -1}, "num_workers must be >= 0, got -1"),
    ({"epoch": 1, "samples_in_epoch": 21}, "sample 21.* outside this dataset of 20"),
    ({"epoch": -1}, "epoch -1"),
]


@pytest.mark.parametrize(("change", "message"), BAD_SIZES)
def test_sizes_that_cannot_work_are_refused_at_once(change: dict[str, int], message: str) -> None:
    options: dict[str, Any] = {"micro_batch_size": 4, "global_batch_size": 4} | change
    with pytest.raises(DataError, match=message):
        TrainLoader(Numbers(20), **options)


def test_an_empty_dataset_is_refused_whatever_the_rule() -> None:
    with pytest.raises(DataError, match="empty"):
        TrainLoader(Numbers(0), micro_batch_size=1, global_batch_size=1, drop_last=False)


def test_a_step_larger_than_the_dataset_is_an_error_instead_of_empty_epochs() -> None:
    loader = loaders(20, 4, 1, 4)[0]
    with pytest.raises(DataError, match="fewer than one global batch of 24"):
        loader.read(6)
    with pytest.raises(DataError, match="num_microbatches must be >= 1, got 0"):
        loader.read(0)


def test_a_dataset_smaller_than_a_global_batch_is_one_step_with_drop_last_false() -> None:
    loader = loaders(5, 2, 1, 8, drop_last=False)[0]
    step = loader.read(4)
    assert step is not None
    assert step.num_samples == 5
    assert [len(batch["x"]) for batch in step.micro_batches] == [2, 2, 1]
    assert loader.read(4) is None
