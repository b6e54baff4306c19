"""Samples that were left out: the others keep their order, and nothing of a running epoch moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onstep.data import SampleOrder, TrainLoader
from onstep.data.loaders.sample_order import ids_in_force, skip_samples
from onstep.errors import DataError


class Numbers(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index)}


def ids_of_epoch(loader: TrainLoader, num_microbatches: int = 1) -> list[int]:
    ids: list[int] = []
    while (step := loader.read(num_microbatches)) is not None:
        assert step.sample_ids is not None
        assert [batch["x"].tolist() for batch in step.micro_batches] == step.sample_ids
        ids += [one for micro in step.sample_ids for one in micro]
    return ids


@pytest.mark.parametrize("num_samples", [1, 2, 5, 64, 1000, 4096, 4097, 8192, 8193, 33_001])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_inverse_finds_the_position_of_every_sample(num_samples: int, shuffle: bool) -> None:
    order = SampleOrder(num_samples, seed=7, epoch=3, shuffle=shuffle)
    positions = np.arange(num_samples)
    assert np.array_equal(order.positions_of(order.at(positions)), positions)


@pytest.mark.parametrize("num_samples", [6, 300, 4096, 4097, 5000, 16_385])
@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_left_keeps_its_order_whatever_is_left_out(num_samples: int, shuffle: bool) -> None:
    generator = np.random.default_rng(num_samples)
    for share in (0.0, 0.01, 0.5, 0.99, 1.0):
        gone = generator.permutation(num_samples)[: round(share * num_samples)].tolist()
        whole = SampleOrder(num_samples, seed=1, epoch=2, shuffle=shuffle).indices(0, num_samples)
        order = SampleOrder(num_samples, seed=1, epoch=2, shuffle=shuffle, leave_out=gone)
        assert order.num_samples == num_samples - len(gone)
        rest = order.indices(0, order.num_samples)
        assert np.array_equal(rest, whole[~np.isin(whole, gone)])
        middle = order.num_samples // 2
        assert np.array_equal(order.indices(middle, order.num_samples), rest[middle:])


def test_gaps_at_both_ends_and_next_to_each_other_are_closed() -> None:
    order = SampleOrder(10, seed=0, epoch=0, shuffle=False, leave_out=[0, 1, 4, 5, 9])
    assert order.indices(0, 5).tolist() == [2, 3, 6, 7, 8]
    with pytest.raises(DataError, match="outside an epoch of 5"):
        order.indices(0, 6)


def test_memory_is_for_what_is_left_out_only() -> None:
    order = SampleOrder(10**12, seed=0, epoch=0, leave_out=[5, 10**11])
    ids = order.indices(10**12 - 10, 10**12 - 2)
    assert order.num_samples == 10**12 - 2
    assert len(set(ids.tolist())) == 8


def test_a_sample_that_is_none_is_refused() -> None:
    with pytest.raises(DataError, match=r"cannot skip samples 3 to 10 of a dataset of 10"):
        SampleOrder(10, seed=0, epoch=0, leave_out=[3, 10])
    with pytest.raises(DataError, match="cannot skip sample 12"):
        TrainLoader(Numbers(12), micro_batch_size=2, global_batch_size=4).leave_out([[0, 3], [0, 12]])


def test_entries_count_from_the_epoch_after_their_own_and_keep_the_first() -> None:
    entries: list[list[int]] = []
    assert skip_samples(entries, 0, [9, 4, 4]) == [4, 9]
    assert skip_samples(entries, 2, [9, 1]) == [1]
    assert entries == [[0, 4], [0, 9], [2, 1]]
    assert [ids_in_force(entries, epoch) for epoch in range(4)] == [[], [4, 9], [4, 9], [1, 4, 9]]


def test_the_running_epoch_goes_on_and_later_ones_never_meet_the_sample() -> None:
    loader = TrainLoader(Numbers(13), micro_batch_size=2, global_batch_size=2, drop_last=False, seed=5)
    untouched = TrainLoader(Numbers(13), micro_batch_size=2, global_batch_size=2, drop_last=False, seed=5)
    first = [loader.read(1), loader.read(1)]
    gone = first[1].sample_ids[0] + [0]  # type: ignore[union-attr, index]
    loader.leave_out([[0, one] for one in gone])
    rest = ids_of_epoch(loader)
    assert [one for step in first for one in step.sample_ids[0]] + rest == ids_of_epoch(untouched)  # type: ignore[union-attr, index]
    assert loader.samples_per_epoch == 13 - len(set(gone))
    later, plain = ids_of_epoch(loader), ids_of_epoch(untouched)
    assert later == [one for one in plain if one not in gone]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_new_loader_continues_at_the_same_sample_however_the_ranks_are_cut(num_workers: int) -> None:
    entries = [[0, 3], [0, 8], [1, 20]]
    options: dict[str, Any] = {"seed": 2, "epoch": 1}
    whole = TrainLoader(Numbers(24), micro_batch_size=4, global_batch_size=4, **options)
    whole.leave_out(entries)
    expected = ids_of_epoch(whole)
    assert len(expected) == 20
    assert {3, 8}.isdisjoint(expected)
    assert 20 in expected
    parts = []
    for rank in range(2):
        part = TrainLoader(
            Numbers(24), micro_batch_size=2, global_batch_size=4, rank=rank, world_size=2, num_workers=num_workers,
            samples_in_epoch=8, **options,
        )  # fmt: skip
        part.leave_out(entries)
        parts.append(ids_of_epoch(part))
        part.close()
    merged = [parts[(i // 2) % 2][i // 4 * 2 + i % 2] for i in range(12)]
    assert merged == expected[8:]


def test_a_list_that_comes_after_reading_began_holds_from_the_position_on() -> None:
    loader = TrainLoader(Numbers(12), micro_batch_size=2, global_batch_size=2, epoch=1, shuffle=False)
    first = loader.read(1)
    assert first is not None
    assert first.sample_ids == [[0, 1]]
    loader.leave_out([[0, 4], [1, 6]])
    assert ids_of_epoch(loader) == [2, 3, 5, 6, 7, 8, 9, 10]


def test_the_length_of_an_epoch_follows() -> None:
    loader = TrainLoader(Numbers(12), micro_batch_size=2, global_batch_size=4)
    loader.leave_out([[0, 5]])
    assert loader.steps_per_epoch(2) == 3
    loader.seek(1, 0)
    assert loader.steps_per_epoch(2) == 2
    assert [loader.read(2) is not None for _ in range(3)] == [True, True, False]
    with pytest.raises(DataError, match="position"):
        loader.seek(1, 12)


def test_a_dataset_with_too_little_left_says_what_became_of_it() -> None:
    loader = TrainLoader(Numbers(8), micro_batch_size=4, global_batch_size=4)
    loader.leave_out([[0, one] for one in range(5)])
    loader.seek(1, 0)
    with pytest.raises(DataError, match=r"3 samples \(5 more were skipped as anomalies\)"):
        loader.read(1)
    loader.leave_out([[0, one] for one in range(8)])
    loader.seek(1, 0)
    with pytest.raises(DataError, match="all 8 samples of the training dataset were skipped"):
        loader.read(1)
