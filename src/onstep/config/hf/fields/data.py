"""Declares the arguments for how samples are read, ordered and collated."""

from __future__ import annotations

from dataclasses import dataclass

from onstep.config.hf.argument import Anything, argument, declares_arguments

STRATEGIES = ("random", "sequential", "group_by_length", "batch_rebalance")


@declares_arguments
@dataclass(kw_only=True)
class DataArguments:
    """How samples are read, ordered and collated."""

    train_sampling_strategy: str = argument("random", choices=STRATEGIES)
    """random | sequential | group_by_length | batch_rebalance; the last two with the samplers of `transformers`."""
    group_by_length: bool = False
    """The name of `train_sampling_strategy='group_by_length'` in transformers 4."""
    length_column_name: str = "length"
    """The column of a `datasets.Dataset` with the lengths to group by; without it the samples are measured."""
    remove_unused_columns: bool = True
    """Whether columns that the model's `forward` has no parameter for are removed from the data."""
    label_names: list[str] | None = None
    """The keys of a batch that are labels; None for those of the model's `forward` with `label` in their name."""
    dataloader_drop_last: bool = False
    """Drop the tail of an epoch that is shorter than one global batch; in the order of a user's sampler or loader, and
    of grouped samples, one that is shorter than a micro-batch on every rank."""
    dataloader_num_workers: int = 0
    dataloader_pin_memory: bool = True
    dataloader_persistent_workers: bool = False
    dataloader_prefetch_factor: int | None = None
    """Micro-batches that each worker reads ahead; None is torch's default, 2."""
    dataloader_multiprocessing_context: str | None = None
    """fork | spawn | forkserver: how workers are started; None is Python's default."""
    accelerator_config: Anything = None
    """A dictionary, the path of a JSON file with one, or an `AcceleratorConfig`. `use_seedable_sampler=False` shuffles
    as torch's `RandomSampler` does; `gradient_accumulation_kwargs={'num_steps': n}` sets
    `gradient_accumulation_steps`."""
