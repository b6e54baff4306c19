"""Selects the loader of a dataset, its collator, and the columns that are passed to the model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset

from onstep.config import ConfigContainer, TrainingArguments
from onstep.config.lengths import sizes_of
from onstep.data import Batch, EvalLoader, IterableLoader, Loader, StepSource, TrainLoader, is_map_style
from onstep.data.loaders.collate import Collate, length_of, name_sample, samples_in
from onstep.data.loaders.hf_streams import SplitRows, check_split, node_split
from onstep.distributed import World
from onstep.errors import ConfigError, DataError
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.loaders.users_data import check_lengths, users_eval_data
from onstep.trainer.loss_convention import inner_module
from onstep.trainer.overrides import overrides

logger = logging.getLogger(__name__)

LABEL_COLUMNS = frozenset({"label", "label_ids", "labels"})
EVALUATION_LOADING = (
    "_get_dataloader",
    "_get_eval_sampler",
    "_remove_unused_columns",
    "_get_collator_with_removed_columns",
)
"""Methods that decide how the samples of an evaluation set are read."""


class WholeLoader(EvalLoader):
    """An `EvalLoader` that always reads the whole set: predictions cover every sample."""

    def batches(self, max_batches: int | None = None) -> Iterator[Batch]:
        """The global batches from the start to the end of the dataset."""
        return super().batches(None)


def train_loader(dataset: Any, collate: Collate, config: ConfigContainer, world: World) -> StepSource:
    """The loader of the training set.

    Raises:
        DataError: for an empty dataset, or one smaller than a global batch if partial batches are dropped.
    """
    train, options = config.train, config.dataset
    seed = config.rng.seed if config.rng.data_seed is None else config.rng.data_seed
    common: dict[str, Any] = {
        "micro_batch_size": train.micro_batch_size,
        "global_batch_size": sizes_of(config, world.data.size).last,
        "seed": seed,
        "drop_last": train.drop_last,
        **_reading(collate, config, world),
    }
    if not is_map_style(dataset):
        check_split(dataset, world.data.rank, world.data.size)
        if world.data.size > 1 and node_split(dataset) is not None:
            return _split_stream(dataset, world, common)
        check_lengths(num_samples_of(dataset), config, world)
        return IterableLoader(dataset, already_batched=isinstance(dataset, DataLoader), **common)
    persistent = options.persistent_workers and options.num_workers > 0
    return TrainLoader(dataset, shuffle=options.shuffle, persistent_workers=persistent, **common)


def _split_stream(dataset: Any, world: World, options: dict[str, Any]) -> Loader:
    alone = {**options, "rank": 0, "world_size": 1, "global_batch_size": None, "drop_last": False}
    least = options["micro_batch_size"] if options["drop_last"] else 1
    rows = SplitRows(IterableLoader(dataset, **alone), world.data.gather_numbers, least)
    return Loader(rows, drop_last=options["drop_last"])


def eval_loader(
    dataset: object,
    collate: Collate | None,
    config: ConfigContainer,
    world: World,
    *,
    is_test: bool = False,
    **options: object,
) -> EvalLoader:
    """The loader of an evaluation set: every sample once, in order; a test set is always read completely.

    `options` of `EvalLoader` replace the configured ones.
    """
    micro, batch = config.validation.eval_micro_batch_size, config.validation.eval_global_batch_size
    assert micro is not None
    assert batch is not None
    if world.data.size > 1 and node_split(dataset) is not None:
        raise DataError(
            "an evaluation stream must not be split by split_dataset_by_node: pass the whole, of which each rank reads "
            "its share"
        )
    kind = WholeLoader if is_test else EvalLoader
    return kind(
        dataset,
        micro_batch_size=micro,
        num_microbatches=batch // (micro * world.data.size),
        **{"already_batched": isinstance(dataset, DataLoader), **_reading(collate, config, world), **options},
    )


def eval_loader_of(
    trainer: BaseTrainer,
    dataset: object,
    collate: Collate,
    config: ConfigContainer,
    world: World,
    *,
    is_test: bool = False,
) -> EvalLoader:
    """The loader of an evaluation set: `eval_loader`, or what the user's methods create. Every rank must call it."""
    method = "get_test_dataloader" if is_test else "get_eval_dataloader"
    if any(overrides(trainer, name) for name in (method, *EVALUATION_LOADING)):
        return as_eval_loader(trainer, getattr(trainer, method)(dataset), config, world, collate, is_test=is_test)
    make = partial(eval_loader, dataset, collate, config, world, is_test=is_test)
    if is_test or not config.dataset.persistent_workers:
        return make()
    keeping = partial(make, persistent_workers=True)
    return trainer.eval_loaders.of_dataset(dataset, trainer.data_collator, _way_to_read(trainer.args), keeping)


def _way_to_read(args: TrainingArguments) -> tuple[object, ...]:
    """The arguments that decide how an evaluation set is read."""
    return (
        *(args.eval_batch_size, args.world_size, args.remove_unused_columns, tuple(args.label_names or ())),
        *(args.dataloader_num_workers, args.dataloader_pin_memory, args.dataloader_prefetch_factor),
        args.dataloader_multiprocessing_context,
    )


def check_eval_data(given: object) -> None:
    """Check what was passed as `eval_dataset`: one dataset, or a dict of them by name.

    Raises:
        DataError: for an empty dataset, which is named if it is one of several; for a list of datasets.
    """
    if isinstance(given, Mapping) and not given:
        raise DataError("eval_dataset={} has no dataset; pass {name: dataset, ...} or None")
    for name, dataset in given.items() if isinstance(given, Mapping) else [(None, given)]:
        if length_of(dataset) == 0:
            shown = "" if name is None else f" {name!r}"
            raise DataError(
                f"the evaluation dataset{shown} is empty: it has 0 samples; give it data or disable evaluation"
            )
    check_samples("eval_dataset", given, "pass a dict of them by name, eval_dataset={'a': a, 'b': b}")


def check_samples(name: str, given: object, remedy: str) -> None:
    """Check that what was passed as a dataset is not a list of datasets.

    Raises:
        DataError: if it is one.
    """
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], (Dataset, DataLoader)):
        raise DataError(f"{name} is a list of {len(given)} datasets, not of samples; {remedy}")


def as_eval_loader(
    trainer: BaseTrainer,
    batches: object,
    config: ConfigContainer,
    world: World,
    collate: Collate | None = None,
    *,
    is_test: bool = False,
) -> EvalLoader:
    """The loader itself if it is Onstep's, else one of a user's loader, or of any iterable of this rank's batches."""
    if isinstance(batches, EvalLoader):
        return batches
    options = users_eval_data(batches, trainer.args, world)
    make = partial(eval_loader, collate=collate, config=config, world=world, is_test=is_test, **options)
    if is_test or not getattr(batches, "persistent_workers", False):
        return make()
    return trainer.eval_loaders.of_loader(batches, partial(make, persistent_workers=True))


def collator(trainer: BaseTrainer) -> Collate:
    """The Trainer's collator; unused columns are removed before it."""
    user: Any = trainer
    if overrides(trainer, "_get_collator_with_removed_columns"):
        collate: Collate = user._get_collator_with_removed_columns(trainer.data_collator, "training")
        return collate
    return column_filter(trainer, trainer.data_collator)


def column_filter(trainer: BaseTrainer, collate: Collate) -> Collate:
    """`collate`, with the columns removed before it that the model or `_signature_columns` does not name."""
    user: Any = trainer
    if not trainer.args.remove_unused_columns:
        return collate
    if trainer.model is None:
        raise ConfigError("The Trainer has no model yet, whose columns to keep: model_init runs when training starts.")
    if overrides(trainer, "_set_signature_columns_if_needed"):
        user._set_signature_columns_if_needed()
    return ColumnFilter(collate, trainer.model, user.label_names, user._signature_columns)


def _reading(collate: Collate | None, config: ConfigContainer, world: World) -> dict[str, Any]:
    return {
        "rank": world.data.rank,
        "world_size": world.data.size,
        "collate_fn": collate,
        "num_workers": config.dataset.num_workers,
        "pin_memory": config.dataset.pin_memory and world.device.type == "cuda",
        "prefetch_factor": config.dataset.prefetch_factor,
        "multiprocessing_context": config.dataset.multiprocessing_context,
    }


def forward_parameters(model: nn.Module) -> list[inspect.Parameter]:
    """The parameters of a model's `forward`, without `*args` and `**kwargs`."""
    parameters = inspect.signature(inner_module(model).forward).parameters.values()
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def parameters_of(model: nn.Module) -> list[str]:
    """The names of `forward_parameters`."""
    return [parameter.name for parameter in forward_parameters(model)]


def num_samples_of(dataset: object) -> int | None:
    """Number of samples of a dataset; None if it has no length."""
    return samples_in(dataset, already_batched=isinstance(dataset, DataLoader))


class ColumnFilter:
    """A collator that drops the columns for which `forward` has no parameter, then calls `collate`.

    Labels are always kept. A `forward` that names no parameter (`*args, **kwargs`) accepts every column. `columns` are
    the ones to keep, instead.
    """

    def __init__(
        self,
        collate: Collate,
        model: nn.Module,
        label_names: Iterable[str] = (),
        columns: Iterable[str] | None = None,
    ) -> None:
        self._collate = collate
        self._labels = LABEL_COLUMNS.union(label_names)
        self._parameters = frozenset(parameters_of(model) if columns is None else columns)
        if columns is not None:
            self._labels = self._labels & self._parameters
        self._wanted = self._parameters | self._labels
        self._model_name = type(model).__name__

    def __call__(self, samples: list[Batch]) -> Batch:
        """Collate a list of samples.

        Raises:
            DataError: if no column is left.
        """
        if self._parameters and samples and isinstance(samples[0], (dict, Mapping)):
            wanted = self._wanted
            if all(map(wanted.issuperset, samples)):
                given, samples = samples, []
                for sample in given:  # not `map`, which would end with a StopIteration of a user's mapping
                    samples.append(dict(sample))  # copies, since a collator may modify its input
            else:
                samples = [{key: value for key, value in sample.items() if key in wanted} for sample in samples]
            if not samples[0]:
                raise DataError(f"The samples have no column that {self._model_name}.forward accepts.")
        return self._collate(samples)

    def check(self, dataset: object) -> None:
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
    try:
        first = dataset[0]
    except Exception as error:
        name_sample(dataset, 0, error)
        raise
    return list(first) if isinstance(first, Mapping) else None
