"""Which loader reads a dataset, and how its samples are collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import nn
from torch.utils.data import DataLoader

from onstep.config import ConfigContainer
from onstep.config.lengths import sizes_of
from onstep.data import EvalLoader, IterableLoader, TrainLoader, default_data_collator, is_map_style
from onstep.distributed import World
from onstep.trainer.base_trainer import BaseTrainer, Collate
from onstep.trainer.columns import ColumnFilter


class EpochTellingLoader(TrainLoader):
    """A `TrainLoader` that tells the epoch to a dataset with `set_epoch`, at the start and wherever the epoch changes.

    Workers that are kept over epochs have copies of the dataset, which are not told.
    """

    def __init__(self, dataset: Any, **options: Any) -> None:
        self._set_epoch = getattr(dataset, "set_epoch", None)
        super().__init__(dataset, **options)

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position."""
        super().seek(epoch, samples_in_epoch)
        if callable(self._set_epoch):
            self._set_epoch(epoch)


class WholeLoader(EvalLoader):
    """An `EvalLoader` that always gives the whole set: predictions are for every sample."""

    def batches(self, max_batches: int | None = None) -> Any:
        """The global batches from the start to the end of the dataset."""
        return super().batches(None)


def train_loader(dataset: Any, collate: Collate, config: ConfigContainer, world: World) -> TrainLoader | IterableLoader:
    """The loader of the training set.

    Raises:
        DataError: for an empty dataset, or one smaller than a global batch that drops its tail.
    """
    train, options = config.train, config.dataset
    seed = config.rng.seed if config.rng.data_seed is None else config.rng.data_seed
    common: dict[str, Any] = {
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": sizes_of(config, world.size).last,
        "seed": seed,
        "drop_last": train.drop_last,
        **_reading(collate, config, world),
    }
    if not is_map_style(dataset):
        return IterableLoader(dataset, already_batched=isinstance(dataset, DataLoader), **common)
    persistent = options.persistent_workers and options.num_workers > 0
    return EpochTellingLoader(dataset, shuffle=options.shuffle, persistent_workers=persistent, **common)


def eval_loader(
    dataset: Any, collate: Collate, config: ConfigContainer, world: World, *, is_test: bool = False
) -> EvalLoader:
    """The loader of an evaluation set: every sample once, in order; of a test set always all of it."""
    micro, batch = config.validation.eval_micro_batch_size, config.validation.eval_global_batch_size
    assert micro is not None
    assert batch is not None
    kind = WholeLoader if is_test else EvalLoader
    return kind(
        dataset,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * world.size),
        already_batched=isinstance(dataset, DataLoader),
        **_reading(collate, config, world),
    )


def collator(trainer: BaseTrainer, module: nn.Module) -> Collate:
    """The user's collator, or the one that suits the processing class; unused columns are left out before it."""
    collate = trainer.data_collator or _default_collator(trainer.processing_class)
    if not trainer.args.remove_unused_columns:
        return collate
    return ColumnFilter(collate, module, trainer.args.label_names or ())


def _reading(collate: Collate, config: ConfigContainer, world: World) -> dict[str, Any]:
    return {
        "rank": world.rank,
        "world_size": world.size,
        "collate_fn": collate,
        "num_workers": config.dataset.num_workers,
        "pin_memory": config.dataset.pin_memory and world.device.type == "cuda",
    }


def _default_collator(processing_class: Any) -> Collate:
    if hasattr(processing_class, "pad") and hasattr(processing_class, "padding_side"):
        from transformers import DataCollatorWithPadding

        padding: Any = DataCollatorWithPadding(processing_class)
        return cast(Callable[[Sequence[Any]], Any], padding)
    return default_data_collator
