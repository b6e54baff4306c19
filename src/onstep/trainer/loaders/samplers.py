"""The samplers of a training set, and how `train_sampling_strategy` and `accelerator_config` choose them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, Sampler, SequentialSampler

from onstep.config import TrainingArguments
from onstep.data import ShuffledSampler, is_map_style
from onstep.errors import ConfigError

GROUPING = ("group_by_length", "batch_rebalance")
"""The values of `train_sampling_strategy` for which a sampler of `transformers` gives the order."""


def reseeds_shuffling(args: TrainingArguments) -> bool:
    """Whether torch's shuffling is seeded for each epoch (`use_seedable_sampler` of `accelerator_config`)."""
    return bool(args.accelerator_config.use_seedable_sampler)


def data_seed(args: TrainingArguments) -> int:
    """The seed of the order of samples."""
    return args.seed if args.data_seed is None else args.data_seed


Order = Sampler[int] | Sampler[list[int]]
"""The order of samples, or of the batches of all ranks."""


def check_strategy(args: TrainingArguments, stream: object) -> None:
    """Refuse (ConfigError) to group the samples of a dataset without an index."""
    if args.train_sampling_strategy in GROUPING:
        raise ConfigError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} requires a train_dataset with a length and an "
            f"index, got {type(stream).__name__}; use 'random' for data in its own order."
        )


def training_sampler(args: TrainingArguments, dataset: Any, processing_class: object) -> Order | None:
    """The sampler for `train_sampling_strategy`; None for a dataset without a length or an index."""
    strategy = args.train_sampling_strategy
    if dataset is None or not is_map_style(dataset):
        return None
    if strategy in GROUPING:
        return _grouped(args, dataset, processing_class)
    if strategy == "sequential":
        return SequentialSampler(dataset)
    if not reseeds_shuffling(args):
        return RandomSampler(dataset)
    return ShuffledSampler(dataset, data_seed(args))


def _grouped(args: TrainingArguments, dataset: Any, processing_class: Any) -> Order:
    try:
        from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
    except ImportError as error:
        raise ConfigError(
            f"train_sampling_strategy={args.train_sampling_strategy!r} uses the sampler of transformers ({error}); "
            "install transformers 5.23 or newer, or use 'random'."
        ) from error
    column = args.length_column_name
    lengths = list(dataset[column]) if column in (getattr(dataset, "column_names", None) or ()) else None
    name = processing_class.model_input_names[0] if processing_class is not None else "input_ids"
    if lengths is None:
        first = dataset[0] if len(dataset) else None
        if not isinstance(first, Mapping) or name not in first:
            raise ConfigError(
                f"train_sampling_strategy={args.train_sampling_strategy!r} requires the length of each sample: samples "
                f"with {name!r}, or a datasets.Dataset with the column {column!r} (length_column_name)."
            )
        lengths = [len(sample[name]) for sample in dataset]
    samples_of_rank = args.train_batch_size * args.gradient_accumulation_steps
    if args.train_sampling_strategy == "group_by_length":
        return LengthGroupedSampler(samples_of_rank, lengths=lengths)
    world_size = args.world_size
    return _Rebalanced(
        [
            BatchRebalanceSampler(
                lengths,
                samples_of_rank * world_size,
                dp_size=world_size,
                grad_accum=args.gradient_accumulation_steps,
                rank=rank,
                drop_last=args.dataloader_drop_last,
            )
            for rank in range(world_size)
        ]
    )


def call_train_sampler(sampler_fn: Callable[..., Order | None], dataset: object) -> Order | None:
    """The result of a `_get_train_sampler`, which has no parameter in transformers 4."""
    return sampler_fn(dataset) if inspect.signature(sampler_fn).parameters else sampler_fn()


def yields_batches(sampler: object) -> bool:
    """Whether a sampler yields micro-batches rather than samples."""
    return isinstance(sampler, (BatchSampler, _Rebalanced, WholeUnits))


class _Rebalanced(Sampler[list[int]]):
    """The micro-batches of `BatchRebalanceSampler` of all ranks, in turn."""

    def __init__(self, samplers: list[Any]) -> None:
        self._samplers = samplers

    def set_epoch(self, epoch: int) -> None:
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return sum(map(len, self._samplers))

    def __iter__(self) -> Iterator[list[int]]:
        return (batch for row in zip(*self._samplers, strict=True) for batch in row)


class WholeUnits(Sampler[list[int]]):
    """The batches of a sampler up to the last full `unit` of them."""

    def __init__(self, batches: Any, unit: int) -> None:
        self.sampler, self._batches, self._unit = batches, batches, unit
        self.batch_size, self.drop_last = getattr(batches, "batch_size", None), True

    def __len__(self) -> int:
        return len(self._batches) // self._unit * self._unit

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._batches)
        while len(unit := list(islice(batches, self._unit))) == self._unit:
            yield from unit
