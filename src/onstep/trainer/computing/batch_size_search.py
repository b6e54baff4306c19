"""Trains again with a smaller batch when memory runs out: `auto_find_batch_size`."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

from onstep.config import TrainingArguments
from onstep.errors import text_of
from onstep.training.profiling.memory import empty_unused_memory

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SIGNS = (
    "out of memory",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.",
    "DefaultCPUAllocator: can't allocate memory",
)
"""Texts of errors by which memory runs out, on GPUs and the CPU. Source: accelerate's `should_reduce_batch_size`."""


@dataclass(frozen=True)
class Search:
    """What a search has come to."""

    given: int
    """`per_device_train_batch_size` at its start."""
    size: int
    """The size in use: after the training the one that fitted."""
    is_retry: bool = False
    """Whether an earlier attempt of this training ran out of memory."""


class Searching(Protocol):
    """The attributes of a Trainer that a search reads and sets."""

    args: TrainingArguments
    model: nn.Module | None
    batch_size_search: Search | None


def with_largest_batch(trainer: Searching, train: Callable[[bool], T], start: int | None) -> T:
    """The result of a training whose micro-batches fit into memory: each attempt has nine tenths of the last size.

    An attempt starts from the first step with the weights as they are, like Hugging Face's Trainer. The next training
    of this Trainer starts with the size that fitted.

    Args:
        train: called with whether it is the first attempt.
        start: the size of the run that is continued; None starts with the argument, or the size that fitted before.

    Raises:
        RuntimeError: the last error, if not even one sample fits.
    """
    given, known, is_first = trainer.args, trainer.batch_size_search, True
    first = given.per_device_train_batch_size
    size = start or (known.size if known is not None and known.given == first else first)
    try:
        while True:
            trainer.batch_size_search = Search(first, size, is_retry=not is_first)
            if size != first:
                trainer.args = copy.copy(given)
                trainer.args.per_device_train_batch_size = size
            try:
                return train(is_first)
            except RuntimeError as error:
                smaller = int(size * 0.9)
                if not is_out_of_memory(error):
                    raise
                if smaller == 0:
                    trainer.batch_size_search = None
                    error.add_note("auto_find_batch_size has tried every batch size down to 1 sample.")
                    raise
            # outside of the handler, whose error keeps the tensors of its frames alive
            _release(trainer)
            logger.warning("out of memory with micro-batches of %d samples; starting again with %d", size, smaller)
            size, is_first = smaller, False
    finally:
        trainer.args = given


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that a device's memory did not suffice."""
    return isinstance(error, torch.OutOfMemoryError) or any(sign in text_of(error) for sign in _SIGNS)


def _release(trainer: Searching) -> None:
    if trainer.model is not None:
        trainer.model.zero_grad()
    gc.collect()
    empty_unused_memory()
