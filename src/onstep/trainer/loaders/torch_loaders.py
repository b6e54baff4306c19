"""Creates the DataLoaders that the Trainer's methods return, and prepares those of a user for several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypedDict, TypeGuard, Unpack

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from onstep.config import TrainingArguments
from onstep.data import Batch, EpochOrders, OrderedBatches, OrderedSamples, OrderRandomness, is_map_style
from onstep.data.loaders.collate import Collate
from onstep.data.loaders.end_of_data import items_of
from onstep.trainer.loaders.samplers import (
    Order,
    WholeUnits,
    check_strategy,
    data_seed,
    reseeds_shuffling,
    yields_batches,
)


class Reading(TypedDict, total=False):
    """How a DataLoader reads its batches."""

    collate_fn: Collate | None
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    multiprocessing_context: str | None
    timeout: float
    worker_init_fn: Callable[[int], None] | None


class LoaderOptions(Reading, total=False):
    """The options of a DataLoader besides its data."""

    persistent_workers: bool


def training_loader(
    args: TrainingArguments,
    dataset: Any,
    batch_size: int,
    sampler: Any,
    unit: int,
    **options: Unpack[LoaderOptions],
) -> Iterable[Batch]:
    """A DataLoader of this rank's micro-batches of a training set, in the order of `sampler` (None: as it is).

    With `dataloader_drop_last`, an epoch ends with the last full `unit` micro-batches of all ranks.
    """
    rank, world_size = args.data_index, args.world_size
    if isinstance(dataset, DataLoader):
        check_strategy(args, dataset)
        return prepared_loader(args, dataset)
    if not is_map_style(dataset):
        check_strategy(args, dataset)
        stream = dataset if isinstance(dataset, IterableDataset) else _Stream(dataset)
        loader = DataLoader(stream, batch_size=batch_size, drop_last=args.dataloader_drop_last, **options)
        return prepared_loader(args, loader)
    if sampler is None:
        sampler = SequentialSampler(dataset)
    batches = sampler if yields_batches(sampler) else BatchSampler(sampler, batch_size, args.dataloader_drop_last)
    if args.dataloader_drop_last and unit > 1:
        batches = WholeUnits(batches, unit)
    ordered = OrderedBatches(_seeded_orders(args, batches), rank, world_size)
    if yields_batches(sampler):
        return DataLoader(dataset, batch_sampler=ordered, **options)
    return DataLoader(dataset, batch_size=batch_size, sampler=OrderedSamples(ordered), **options)


def evaluation_loader(
    args: TrainingArguments,
    dataset: Any,
    batch_size: int,
    sampler: Order | None,
    **options: Unpack[LoaderOptions],
) -> Iterable[Batch]:
    """A DataLoader of this rank's batches of an evaluation set, in the order of `sampler` (None: as it is)."""
    if isinstance(dataset, DataLoader):
        return dataset
    stream = dataset if is_map_style(dataset) or isinstance(dataset, IterableDataset) else _Stream(dataset)
    loader = DataLoader(stream, batch_size=batch_size, sampler=sampler, **options)
    return loader if args.world_size == 1 else prepared_loader(args, loader)


def prepared_loader(args: TrainingArguments, loader: DataLoader[Batch]) -> Iterable[Batch]:
    """A user's loader as `accelerator.prepare` returns it: its batches are dealt to the ranks in turn.

    With `use_seedable_sampler`, the default of `accelerator_config`, torch's `RandomSampler` is seeded with
    `data_seed`, else `seed`, plus the epoch.
    """
    if lists_batches(loader):
        if isinstance(loader.batch_sampler, OrderedBatches) or isinstance(loader.sampler, OrderedSamples):
            return loader
        orders = _seeded_orders(args, loader.batch_sampler, loader.generator)
        batches = OrderedBatches(orders, args.data_index, args.world_size)
        return DataLoader(
            loader.dataset,
            batch_sampler=batches,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )
    return loader if args.world_size == 1 else _Dealt(loader, args.data_index, args.world_size)


def lists_batches(loader: object) -> TypeGuard[DataLoader[Batch]]:
    """Whether a loader is torch's own over a map-style dataset, so that its batches can be listed before reading."""
    own = (DataLoader.__iter__, DataLoader._get_iterator)
    return (
        isinstance(loader, DataLoader)
        and (type(loader).__iter__, type(loader)._get_iterator) == own
        and loader.batch_sampler is not None
        and not isinstance(loader.dataset, IterableDataset)
    )


def _seeded_orders(
    args: TrainingArguments, batch_sampler: Iterable[object] | None, generator: torch.Generator | None = None
) -> EpochOrders:
    return EpochOrders(
        batch_sampler,
        OrderRandomness(args.seed),
        shuffle_seed=data_seed(args),
        reseeds_shuffling=reseeds_shuffling(args),
        generator=generator,
        max_batches=batches_of_run(args),
    )


def batches_of_run(args: TrainingArguments) -> int | None:
    """Micro-batches of all ranks in a run of `max_steps`: no epoch has more, even if a sampler never ends."""
    return args.max_steps * args.gradient_accumulation_steps * args.world_size if args.max_steps > 0 else None


class _Dealt:
    """This rank's batches of a loader without a sampler; the last row is completed with the first batches."""

    def __init__(self, loader: DataLoader[Batch], rank: int, world_size: int) -> None:
        self.dataset = getattr(loader, "dataset", None)
        self._loader, self._rank, self._world_size = loader, rank, world_size

    def __len__(self) -> int:
        return -(-len(self._loader) // self._world_size)

    def set_epoch(self, epoch: int) -> None:
        for part in (self._loader, self.dataset):
            set_epoch = getattr(part, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        first: list[Batch] = []
        row: list[Batch] = []
        for batch in items_of(self._loader):
            row.append(batch)
            if len(first) < self._world_size:
                first.append(batch)
            if len(row) == self._world_size:
                yield row[self._rank]
                row = []
        if row:
            yield [*row, *first * self._world_size][self._rank]


class _Stream(IterableDataset[Batch]):
    """A plain iterable for a DataLoader."""

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.source)
