"""Selects the loader of a dataset, its collator, and the columns that are passed to the model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.utils.data import DataLoader

from onstep.config import ConfigContainer
from onstep.config.lengths import sizes_of
from onstep.data import EvalLoader, IterableLoader, TrainLoader, default_data_collator, is_map_style
from onstep.distributed import World
from onstep.errors import DataError
from onstep.trainer.base_trainer import BaseTrainer, Collate
from onstep.trainer.loss_convention import inner_module
from onstep.trainer.overrides import overrides

logger = logging.getLogger(__name__)

LABEL_COLUMNS = frozenset({"label", "label_ids", "labels"})


class SetEpochLoader(TrainLoader):
    """A `TrainLoader` that calls `set_epoch` of a dataset, at the start and whenever the epoch changes.

    The workers of such a dataset do not persist over epochs: they have copies of it, which are not updated.
    """

    def __init__(self, dataset: Any, *, persistent_workers: bool = False, **options: Any) -> None:
        self._set_epoch = getattr(dataset, "set_epoch", None)
        super().__init__(dataset, persistent_workers=persistent_workers and not callable(self._set_epoch), **options)

    def seek(self, epoch: int, samples_in_epoch: int) -> None:
        """Continue from this position."""
        super().seek(epoch, samples_in_epoch)
        if callable(self._set_epoch):
            self._set_epoch(epoch)


class WholeLoader(EvalLoader):
    """An `EvalLoader` that always reads the whole set: predictions cover every sample."""

    def batches(self, max_batches: int | None = None) -> Any:
        """The global batches from the start to the end of the dataset."""
        return super().batches(None)


def train_loader(dataset: Any, collate: Collate, config: ConfigContainer, world: World) -> TrainLoader | IterableLoader:
    """The loader of the training set.

    Raises:
        DataError: for an empty dataset, or one smaller than a global batch if partial batches are dropped.
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
    return SetEpochLoader(dataset, shuffle=options.shuffle, persistent_workers=persistent, **common)


def eval_loader(
    dataset: Any,
    collate: Collate | None,
    config: ConfigContainer,
    world: World,
    *,
    is_test: bool = False,
    already_batched: bool = False,
) -> EvalLoader:
    """The loader of an evaluation set: every sample once, in order; a test set is always read completely."""
    micro, batch = config.validation.eval_micro_batch_size, config.validation.eval_global_batch_size
    assert micro is not None
    assert batch is not None
    kind = WholeLoader if is_test else EvalLoader
    return kind(
        dataset,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * world.size),
        already_batched=already_batched or isinstance(dataset, DataLoader),
        **_reading(collate, config, world),
    )


def evaluation_loader(
    trainer: BaseTrainer,
    dataset: Any,
    collate: Collate,
    config: ConfigContainer,
    world: World,
    *,
    is_test: bool = False,
) -> EvalLoader:
    """The loader of an evaluation set: `eval_loader`, or what the user's method creates. Every rank must call it."""
    method = "get_test_dataloader" if is_test else "get_eval_dataloader"
    if overrides(trainer, method):
        return as_eval_loader(getattr(trainer, method)(dataset), config, world, is_test=is_test)
    return eval_loader(dataset, collate, config, world, is_test=is_test)


def as_eval_loader(batches: Any, config: ConfigContainer, world: World, *, is_test: bool = False) -> EvalLoader:
    """The loader itself if it is Onstep's, else one of the ready-made batches of an iterable."""
    if isinstance(batches, EvalLoader):
        return batches
    return eval_loader(batches, None, config, world, is_test=is_test, already_batched=True)


def collator(trainer: BaseTrainer, module: nn.Module) -> Collate:
    """The user's collator, or the one that suits the processing class; unused columns are removed before it."""
    collate = trainer.data_collator or _default_collator(trainer.processing_class)
    if not trainer.args.remove_unused_columns:
        return collate
    return ColumnFilter(collate, module, trainer.args.label_names or ())


def _reading(collate: Collate | None, config: ConfigContainer, world: World) -> dict[str, Any]:
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


def num_samples_of(dataset: Any) -> int | None:
    """Number of samples of a dataset; None if it has no length."""
    samples: Any = dataset.dataset if isinstance(dataset, DataLoader) else dataset
    try:
        return len(samples)
    except (TypeError, NotImplementedError):
        return None


class ColumnFilter:
    """A collator that drops the columns for which `forward` has no parameter, then calls `collate`.

    Labels are always kept. A `forward` that names no parameter (`*args, **kwargs`) accepts every column.
    """

    def __init__(
        self, collate: Callable[[Sequence[Any]], Any], model: nn.Module, label_names: Iterable[str] = ()
    ) -> None:
        self._collate = collate
        self._labels = LABEL_COLUMNS.union(label_names)
        parameters = inspect.signature(inner_module(model).forward).parameters.values()
        self._parameters = frozenset(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        self._wanted = self._parameters | self._labels
        self._model_name = type(model).__name__

    def __call__(self, samples: Sequence[Any]) -> Any:
        """Collate a list of samples.

        Raises:
            DataError: if no column is left.
        """
        if self._parameters and samples and isinstance(samples[0], (dict, Mapping)):
            wanted = self._wanted
            if all(map(wanted.issuperset, samples)):
                samples = list(map(dict, samples))  # copies, since a collator may modify its input
            else:
                samples = [{key: value for key, value in sample.items() if key in wanted} for sample in samples]
            if not samples[0]:
                raise DataError(f"The samples have no column that {self._model_name}.forward accepts.")
        return self._collate(samples)

    def check(self, dataset: Any) -> None:
        """Check that a dataset has a column for the model, using its `column_names` or its first sample.

        The columns that are dropped are logged.

        Raises:
            DataError: if it has none.
        """
        columns = _columns_of(dataset)
        dropped = [column for column in columns or () if column not in self._wanted]
        if dropped and self._parameters:
            logger.info(
                "columns that %s.forward does not accept are dropped: %s (remove_unused_columns)",
                self._model_name,
                ", ".join(dropped),
            )
        if not self._parameters or columns is None or (self._parameters - self._labels).intersection(columns):
            return
        if not self._parameters - self._labels:  # the model expects only labels
            return
        raise DataError(
            f"No column of the dataset ({', '.join(columns)}) is a parameter of {self._model_name}.forward "
            f"({', '.join(sorted(self._parameters))}); rename the columns, or pass remove_unused_columns=False with "
            f"your own data_collator."
        )


def _columns_of(dataset: Any) -> list[str] | None:
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list):
        return names
    if not is_map_style(dataset) or len(dataset) == 0:
        return None
    first = dataset[0]
    return list(first) if isinstance(first, Mapping) else None
