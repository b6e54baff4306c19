"""What rows draw in workers is a pure function of their place: of no worker, no start, and no earlier row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from onstep.data import EvalLoader, IterableLoader, TrainLoader

NUM_SAMPLES = 24

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
"""A machine with fewer cores than workers is no reason to draw other numbers."""


def draws() -> torch.Tensor:
    """A number of each generator that is seeded."""
    return torch.tensor([torch.rand(()).item(), np.random.random(), random.random()], dtype=torch.float64)


class Augmented:
    """Each sample is its index with three random numbers."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor(index), "augmentation": draws()}


class AugmentedStream(torch.utils.data.IterableDataset[Any]):
    """Samples in a random order, each with three random numbers."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        order = random.sample(range(NUM_SAMPLES), NUM_SAMPLES)
        return ({"x": torch.tensor(index), "augmentation": draws()} for index in order)


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    return {**batch, "noise": draws()}


Loader = TrainLoader | IterableLoader
Rows = list[dict[str, torch.Tensor]]


def mapped(*, num_workers: int = 1, seed: int = 3, micro: int = 2, **options: Any) -> TrainLoader:
    return TrainLoader(
        Augmented(),
        micro_batch_size=micro,
        global_batch_size=4,
        seed=seed,
        collate_fn=collate,
        num_workers=num_workers,
        **options,
    )


def streamed(*, num_workers: int = 1, seed: int = 3, micro: int = 2, **options: Any) -> IterableLoader:
    return IterableLoader(
        AugmentedStream(), micro_batch_size=micro, seed=seed, collate_fn=collate, num_workers=num_workers, **options
    )


def rest_of_epoch(loader: Loader, num_microbatches: int = 2) -> Rows:
    rows: Rows = []
    while (step := loader.read(num_microbatches)) is not None:
        rows += step.micro_batches
    loader.close()
    return rows


def column(rows: Rows, name: str) -> list[Any]:
    return [batch[name].tolist() for batch in rows]


def same(rows: Rows, others: Rows) -> bool:
    return [{n: v.tolist() for n, v in row.items()} for row in rows] == [
        {n: v.tolist() for n, v in row.items()} for row in others
    ]


def test_any_number_of_workers_draws_the_same() -> None:
    one, two, three = (rest_of_epoch(mapped(num_workers=n)) for n in (1, 2, 3))
    assert len(one) == NUM_SAMPLES // 2
    assert same(one, two)
    assert same(one, three)


@pytest.mark.parametrize(("make", "num_workers"), [(mapped, 1), (mapped, 3), (streamed, 1)])
def test_an_epoch_continued_at_a_position_draws_what_was_left(make: Any, num_workers: int) -> None:
    for epoch in (0, 1):
        whole = rest_of_epoch(make(num_workers=2, epoch=epoch))
        for position in (4, 20):
            tail = rest_of_epoch(make(num_workers=num_workers, epoch=epoch, samples_in_epoch=position))
            assert same(tail, whole[position // 2 :])


@pytest.mark.parametrize("make", [mapped, streamed])
def test_a_new_epoch_draws_the_same_whether_the_loader_is_new_or_not(make: Any) -> None:
    loader = make()
    epochs = [rest_of_epoch(loader), rest_of_epoch(loader)]
    assert same(epochs[1], rest_of_epoch(make(epoch=1)))
    assert not same(*epochs)


def test_persistent_workers_draw_the_same() -> None:
    kept = mapped(num_workers=2, persistent_workers=True)
    epochs: list[Rows] = [[], []]
    for rows in epochs:
        while (step := kept.read(2)) is not None:
            rows += step.micro_batches
    kept.close()
    assert same(epochs[0], rest_of_epoch(mapped()))
    assert same(epochs[1], rest_of_epoch(mapped(epoch=1)))


@pytest.mark.parametrize("make", [mapped, streamed])
def test_samples_rows_epochs_ranks_and_seeds_draw_differently(make: Any) -> None:
    runs = [
        rest_of_epoch(make(micro=2)),
        rest_of_epoch(make(micro=2, epoch=1)),
        rest_of_epoch(make(micro=2, seed=4)),
    ]
    noise = [number for rows in runs for row in column(rows, "noise") for number in row]
    augmentation = [number for rows in runs for row in column(rows, "augmentation") for own in row for number in own]
    numbers = noise + augmentation
    assert len(set(numbers)) == len(numbers) == 3 * 3 * (NUM_SAMPLES + NUM_SAMPLES // 2)


@pytest.mark.parametrize("make", [mapped, streamed])
def test_ranks_draw_differently_in_the_collator(make: Any) -> None:
    ranks = [rest_of_epoch(make(rank=rank, world_size=2), 1) for rank in (0, 1)]
    noise = [number for rows in ranks for row in column(rows, "noise") for number in row]
    assert len(set(noise)) == len(noise) == 3 * NUM_SAMPLES // 2


def test_a_stream_in_random_order_is_the_same_on_every_rank_and_for_every_split() -> None:
    whole = [x for row in column(rest_of_epoch(streamed(micro=4), 1), "x") for x in row]
    ranks = [column(rest_of_epoch(streamed(rank=rank, world_size=2), 1), "x") for rank in (0, 1)]
    assert [x for row in zip(*ranks, strict=True) for own in row for x in own] == whole
    assert whole != sorted(whole) == list(range(NUM_SAMPLES))
    assert [x for row in column(rest_of_epoch(streamed(micro=3, samples_in_epoch=6), 1), "x") for x in row] == whole[6:]


def test_a_filler_draws_for_itself() -> None:
    def tail(rank: int) -> Any:
        loader = TrainLoader(
            Augmented(6),
            micro_batch_size=1,
            global_batch_size=4,
            rank=rank,
            world_size=4,
            drop_last=False,
            collate_fn=collate,
            num_workers=1,
        )
        step = loader.read(2)
        loader.close()
        assert step is not None
        assert step.is_filler == [False, rank > 1]
        return [batch["noise"].tolist() for batch in step.micro_batches]

    noise = [number for rank in range(4) for row in tail(rank) for number in row]
    assert len(set(noise)) == len(noise)


@pytest.mark.parametrize("data", [Augmented(), AugmentedStream()])
def test_each_evaluation_draws_the_same(data: Any) -> None:
    loader = EvalLoader(data, micro_batch_size=2, collate_fn=collate, num_workers=2)
    first, second = ([batch for step in loader.batches() for batch in step.micro_batches] for _ in range(2))
    assert len(first) == NUM_SAMPLES // 2
    assert same(first, second)


@pytest.mark.parametrize("make", [mapped, streamed])
def test_workers_leave_the_random_state_of_the_training_process_alone(make: Any) -> None:
    seed_all(5)
    expected = draws().tolist()
    seed_all(5)
    rest_of_epoch(make(num_workers=2))
    assert draws().tolist() == expected


@pytest.mark.parametrize("make", [mapped, streamed])
def test_without_workers_the_state_of_the_process_is_drawn_from(make: Any) -> None:
    seed_all(5)
    first = rest_of_epoch(make(num_workers=0))
    going_on = draws().tolist()
    seed_all(5)
    assert same(rest_of_epoch(make(num_workers=0)), first)
    assert draws().tolist() == going_on
    assert not same(rest_of_epoch(make(num_workers=0)), first)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
