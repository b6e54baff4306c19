"""A `StopIteration` out of a user's function is an error, and never the end of a batch, an epoch or an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from onstep import Trainer, TrainingArguments
from onstep.data import EvalLoader, IterableLoader, IteratorReader, TrainLoader
from onstep.data.loaders.end_of_data import items_of
from onstep.errors import DataError
from tests.support.small_models import Regression

ESCAPED = "raised StopIteration"


class Numbers:
    """Eight samples; reading sample 5 asks an exhausted iterator for an item."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(next(iter(()))) if index == 5 else float(index)}


class NumbersAtOnce(Numbers):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class TooFew(Numbers):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return list(map(self.__getitem__, indices))


class Sound(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": float(index)}


class Stream(IterableDataset[dict[str, Any]]):
    def __init__(self, samples: type[Numbers] = Numbers) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.samples().__getitem__, range(8))


class Counting:
    """An iterator of a user that ends itself, in a method of its own."""

    def __init__(self) -> None:
        self.num_read = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> dict[str, Any]:
        return self._read()

    def _read(self) -> dict[str, Any]:
        if self.num_read == 3:
            raise StopIteration
        self.num_read += 1
        return {"x": torch.tensor([float(self.num_read)])}


def collate_nothing(samples: list[Any]) -> Any:
    return next(iter(()))


def train_loader(dataset: Any, **options: Any) -> TrainLoader:
    return TrainLoader(dataset, micro_batch_size=4, global_batch_size=4, shuffle=False, **options)


def iterable_loader(source: Any, **options: Any) -> IterableLoader:
    return IterableLoader(source, micro_batch_size=4, global_batch_size=4, **options)


def eval_loader(dataset: Any, **options: Any) -> EvalLoader:
    return EvalLoader(dataset, micro_batch_size=4, **options)


def read_all(loader: Any) -> int:
    """Number of steps of an epoch."""
    if isinstance(loader, EvalLoader):
        return sum(1 for _ in loader.batches())
    num_steps = 0
    while loader.read(1) is not None:
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "loader",
    [
        partial(train_loader, Numbers()),
        partial(train_loader, NumbersAtOnce()),
        partial(train_loader, Sound(), collate_fn=collate_nothing),
        partial(eval_loader, Numbers()),
        partial(iterable_loader, Stream()),
        partial(iterable_loader, Stream(Sound), collate_fn=collate_nothing),
    ],
    ids=["sample", "samples", "collator", "evaluation", "stream", "collator of a stream"],
)
def test_what_reads_a_sample_cannot_end_the_data(loader: Callable[..., Any], num_workers: int) -> None:
    with pytest.raises(DataError, match=ESCAPED):
        read_all(loader(num_workers=num_workers))


def test_a_dataset_that_returns_too_few_samples_is_refused() -> None:
    with pytest.raises(DataError, match="__getitems__ of TooFew returned 1 of 4 samples"):
        read_all(train_loader(TooFew()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_the_user_cannot_be_cut_off_either(num_workers: int) -> None:
    def batches(dataset: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(dataset, batch_size=4, num_workers=num_workers, **options)

    readers = (
        lambda loader: read_all(IteratorReader(iter(loader))),
        lambda loader: read_all(iterable_loader(loader, already_batched=True)),
        lambda loader: read_all(eval_loader(loader, already_batched=True)),
    )
    for read in readers[: 1 if num_workers else None]:
        for bad in (batches(Numbers()), batches(Sound(), collate_fn=collate_nothing)):
            with pytest.raises(DataError, match=ESCAPED):
                read(bad)
        assert read(batches(Sound())) == read(batches(Stream(Sound))) == 2


def test_the_end_of_an_iterator_is_its_own() -> None:
    assert len(list(items_of(Counting()))) == 3
    assert len(list(items_of(map(dict, Counting())))) == 3
    assert len(list(items_of(zip(range(9), Counting(), strict=False)))) == 3
    assert list(items_of(one for one in (1, 2))) == [1, 2]


class Rows(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((3,), super().__getitem__(index)["x"]), "labels": 1.0}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_training_does_not_miss_samples_without_a_word(num_workers: int, tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=8,
        num_train_epochs=1,
        dataloader_num_workers=num_workers,
        use_cpu=True,
        report_to="none",
    )
    with pytest.raises(DataError, match=ESCAPED):
        Trainer(Regression(), args, train_dataset=Rows()).train()
