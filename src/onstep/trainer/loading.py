"""Which loader reads a dataset, and how its samples are collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from onstep.data import EvalLoader, IterableLoader, TrainLoader, default_data_collator
from onstep.errors import ConfigError
from onstep.trainer.columns import ColumnFilter
from onstep.training.state import GlobalState

if TYPE_CHECKING:
    from onstep.trainer.trainer import Trainer


def train_loader(trainer: Trainer, state: GlobalState, module: nn.Module) -> TrainLoader | IterableLoader:
    """The loader of the training set.

    Raises:
        ConfigError: for a dataset without a length when `max_steps` is not set.
    """
    config, world, dataset = state.cfg, state.world, trainer.train_dataset
    train, options = config.train, config.dataset
    assert train.micro_batch_size is not None
    assert train.global_batch_size is not None
    common: dict[str, Any] = {
        "micro_batch_size": train.micro_batch_size,
        "rank": world.rank,
        "world_size": world.size,
        "collate_fn": collator(trainer, module),
        "num_workers": options.num_workers,
        "pin_memory": options.pin_memory and world.device.type == "cuda",
    }
    if not is_map_style(dataset):
        if train.train_iters is None:
            raise ConfigError(
                "The training data has no length, so num_train_epochs cannot tell when to stop; set max_steps."
            )
        return IterableLoader(dataset, **common)
    seed = config.rng.seed if config.rng.data_seed is None else config.rng.data_seed
    return TrainLoader(
        dataset,
        global_batch_size=train.global_batch_size,
        seed=seed,
        shuffle=options.shuffle,
        drop_last=train.drop_last,
        persistent_workers=options.persistent_workers and options.num_workers > 0,
        **common,
    )


def eval_loader(trainer: Trainer, state: GlobalState, dataset: Any, module: nn.Module) -> EvalLoader:
    """The loader of an evaluation set: every sample once, in order."""
    world, options = state.world, state.cfg.dataset
    micro = state.cfg.validation.eval_micro_batch_size or trainer.args.per_device_eval_batch_size
    return EvalLoader(
        dataset,
        micro_batch_size=micro,
        rank=world.rank,
        world_size=world.size,
        collate_fn=collator(trainer, module),
        num_workers=options.num_workers,
        pin_memory=options.pin_memory and world.device.type == "cuda",
    )


def is_map_style(dataset: Any) -> bool:
    """Whether samples are read by index."""
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def collator(trainer: Trainer, module: nn.Module) -> Callable[[Sequence[Any]], Any]:
    """The user's collator, or the one that suits the processing class; unused columns are left out before it."""
    collate = trainer.data_collator
    if collate is None:
        collate = _default_collator(trainer.processing_class)
    if not trainer.args.remove_unused_columns:
        return collate
    return ColumnFilter(collate, module, trainer.args.label_names or [])


def _default_collator(processing_class: Any) -> Callable[[Sequence[Any]], Any]:
    if processing_class is not None and hasattr(processing_class, "pad") and hasattr(processing_class, "padding_side"):
        from transformers import DataCollatorWithPadding

        padding: Any = DataCollatorWithPadding(processing_class)
        return cast(Callable[[Sequence[Any]], Any], padding)
    collate: Callable[[Sequence[Any]], Any] = default_data_collator
    return collate
