"""Reads the loaders that a user's methods create."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from onstep.config import ConfigContainer, TrainingArguments, merge
from onstep.config.hf.argument import argument_of
from onstep.config.keys import diff
from onstep.data import (
    Batch,
    EpochOrders,
    IterableLoader,
    ListedRows,
    Loader,
    OrderedBatches,
    OrderedSamples,
    OrderRandomness,
    StepSource,
)
from onstep.data.loaders.collate import length_of
from onstep.data.loaders.micro_batch_reader import outlive_the_group
from onstep.data.loaders.sample_order import MicroBatchLayout
from onstep.distributed import World
from onstep.errors import ConfigError, DataError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.loaders.samplers import GROUPING, reseeds_shuffling
from onstep.trainer.loaders.torch_loaders import Reading, batches_of_run, lists_batches, prepared_loader
from onstep.trainer.overrides import overrides
from onstep.training.run import Run

LOADING = (
    "get_train_dataloader",
    "_get_dataloader",
    "_get_train_sampler",
    "_remove_unused_columns",
    "_get_collator_with_removed_columns",
)
"""Methods that decide what a training reads, and in which order."""


@dataclass(frozen=True)
class UsersData:
    """What a training reads where a user's methods or arguments decide it."""

    loader: object
    """What `get_train_dataloader` returned."""
    num_samples: int | None
    """Samples of an epoch as the length of the run counts them: all micro-batches full; None if unknown."""
    open: Callable[[ConfigContainer, World], StepSource]
    """Creates the source that the loop reads; every rank must call it."""


def decides_data(trainer: BaseTrainer) -> bool:
    """Whether the user's methods or arguments, rather than the training set alone, decide what a training reads."""
    args = trainer.args
    is_special = args.train_sampling_strategy in GROUPING or not reseeds_shuffling(args)
    return is_special or any(overrides(trainer, name) for name in LOADING)


_OF_READING = ("rng.seed", "rng.data_seed", "train.micro_batch_size", "train.drop_last", "dataset.num_workers")
"""Keys that decide about Onstep's own loader; another is made of the arguments."""


def users_data(trainer: BaseTrainer) -> UsersData:
    """What `trainer.get_train_dataloader()` returns, prepared for the loop.

    Raises:
        DataError: if that cannot be read.
        ConfigError: for a key in `config_overrides` without an effect on it.
    """
    user: Any = trainer
    args = trainer.args
    configured = ConfigContainer()
    merge(configured, args.config_overrides or {})
    for key, _, value in diff(ConfigContainer(), configured):
        if key in _OF_READING:
            raise ConfigError(
                f"config_overrides[{key!r}]={value} has no effect where {type(trainer).__name__} or the arguments "
                f"decide what is read; set TrainingArguments.{argument_of(key)}."
            )
    randomness = OrderRandomness(args.seed)
    with randomness.applied():
        loader = user.get_train_dataloader()
    if not hasattr(loader, "__iter__"):
        raise DataError(f"get_train_dataloader must return a DataLoader, got {type(loader).__name__}.")
    if user.accelerator.is_prepared(loader):
        loader = prepared_loader(args, loader)
    row_size = args.per_device_train_batch_size * args.world_size
    if not lists_batches(loader):
        num_batches = length_of(loader)
        num_samples = None if num_batches is None else num_batches * row_size
        return UsersData(loader, num_samples, partial(_open_ready, loader, args, num_samples))
    orders, is_share = _orders_of(loader, randomness, args)
    num_batches = orders.num_batches
    if num_batches is None and args.max_steps <= 0:
        raise ConfigError(
            f"The sampler {orders.sampler_name} has no length, so num_train_epochs cannot end the run; give "
            "it __len__, or set max_steps."
        )
    num_rows = None if num_batches is None else num_batches if is_share else -(-num_batches // args.world_size)
    return UsersData(
        loader, None if num_rows is None else num_rows * row_size, partial(_open_listed, loader, orders, args, is_share)
    )


def whole_epochs(args: TrainingArguments) -> TrainingArguments:
    """Arguments of a run whose loader has dropped the tail of an epoch already, if it is to be dropped."""
    args = copy.copy(args)
    args.dataloader_drop_last = False
    return args


def count_examples(trainer: BaseTrainer, run: Run, data: UsersData | None) -> None:
    """Show the samples of an epoch as the user's methods count them, in Hugging Face's view."""
    user: Any = trainer
    if overrides(trainer, "num_examples"):
        run.info.num_examples = user.num_examples(run.train_dataloader)
    elif data is not None:
        dataset = getattr(data.loader, "dataset", None)
        has_length = length_of(data.loader) is not None or length_of(dataset) is not None
        run.info.num_examples = user.num_examples(data.loader) if has_length else None


def count_micro_batches(run: Run, train_data: StepSource) -> None:
    """Count epochs in micro-batches, as Hugging Face's Trainer: of data without a length, the run is one epoch."""
    of_epoch = train_data.steps_per_epoch(1) or run.info.max_steps * run.num_microbatches
    run.info.micro_batches = (run.num_microbatches, of_epoch) if of_epoch else None


def _orders_of(
    loader: DataLoader[Batch], randomness: OrderRandomness, args: TrainingArguments
) -> tuple[EpochOrders, bool]:
    """The micro-batches of a loader by epoch, and whether they are this rank's only, as of a loader that was not
    prepared for several ranks.
    """
    sampler = loader.batch_sampler
    dealt = loader.sampler.batches if isinstance(loader.sampler, OrderedSamples) else sampler
    if isinstance(dealt, OrderedBatches):
        return dealt.orders.again(), False
    return EpochOrders(sampler, randomness, generator=loader.generator, max_batches=batches_of_run(args)), True


def _open_listed(
    loader: DataLoader[Batch],
    orders: EpochOrders,
    args: TrainingArguments,
    is_share: bool,
    config: ConfigContainer,
    world: World,
) -> StepSource:
    counts = world.gather(orders.num_batches) if is_share else []
    if len(set(counts)) > 1:
        raise DataError(
            f"get_train_dataloader returned loaders of {', '.join(map(str, counts))} batches on the ranks, which would "
            "wait for each other forever; give each rank equally many, or return self.accelerator.prepare(loader)"
        )
    rows = ListedRows(
        loader.dataset,
        orders,
        MicroBatchLayout(args.per_device_train_batch_size, world.data.rank, world.data.size),
        is_share=is_share,
        seed=config.rng.seed if config.rng.data_seed is None else config.rng.data_seed,
        **_reading(loader, world),
        persistent_workers=loader.persistent_workers,
    )
    return Loader(rows, drop_last=False)


def _reading(loader: DataLoader[Batch], world: World) -> Reading:
    """How a DataLoader reads its batches, for our own readers."""
    return {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory and world.device.type == "cuda",
        "prefetch_factor": loader.prefetch_factor,
        "multiprocessing_context": loader.multiprocessing_context,
        "timeout": loader.timeout,
        "worker_init_fn": partial(_start_worker, loader.worker_init_fn),
    }


def _start_worker(users: Callable[[int], object] | None, worker_id: int) -> None:
    outlive_the_group(worker_id)
    if users is not None:
        users(worker_id)


class _ReadyLoader(IterableLoader):
    """An `IterableLoader` of ready-made batches with the length that the run was planned with."""

    def __init__(self, source: Iterable[Batch], num_samples: int | None, **options: Any) -> None:
        super().__init__(source, already_batched=True, drop_last=False, **options)
        self._num_samples = num_samples

    @property
    def num_samples(self) -> int | None:
        return self._num_samples


def _open_ready(
    loader: DataLoader[Batch], args: TrainingArguments, num_samples: int | None, config: ConfigContainer, world: World
) -> StepSource:
    check_lengths(num_samples, config, world)
    return _ReadyLoader(
        loader,
        num_samples,
        micro_batch_size=args.per_device_train_batch_size,
        rank=world.data.rank,
        world_size=world.data.size,
        seed=config.rng.seed if config.rng.data_seed is None else config.rng.data_seed,
    )


def check_lengths(num_samples: int | None, config: ConfigContainer, world: World) -> None:
    """Check that the ranks plan runs of equal length, for data of which each rank finds the length itself. Collective.

    Raises:
        DataError: on all ranks, if the run's length in steps follows from lengths that differ.
    """
    if config.train.train_iters is not None or config.train.train_samples is not None:
        return
    lengths = world.gather(num_samples)
    if len(set(lengths)) > 1:
        raise DataError(
            f"the training data has {', '.join(map(str, lengths))} samples on the ranks (by its __len__), so that they "
            "would train for different numbers of steps; give it the same length on all ranks, or set max_steps"
        )


def users_eval_data(loader: object, args: TrainingArguments, world: World) -> dict[str, Any]:
    """A user's loader of an evaluation set as arguments of `EvalLoader`: its batches are dealt to the ranks.

    The batches of one that splits its samples itself (a DistributedSampler), and those that cannot be listed before
    reading, are read by this rank as they come.
    """
    if not lists_batches(loader) or getattr(loader.sampler, "num_replicas", 1) > 1:
        return {"dataset": loader, "already_batched": True}
    randomness = OrderRandomness(args.seed)
    orders = _orders_of(loader, randomness, args)[0]
    return {"dataset": loader.dataset, "listed": orders.of(0, to_length=False), **_reading(loader, world)}
