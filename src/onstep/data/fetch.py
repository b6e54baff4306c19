"""How the samples of a micro-batch are read from a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from copy import copy
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from onstep.data.collate import default_data_collator

Collate = Callable[[list[Any]], Any]
Fetch = Callable[[list[int]], Any]


def is_map_style(dataset: Any) -> bool:
    """Whether samples are read by index (`__getitem__` and `__len__`), rather than in the order they come."""
    if isinstance(dataset, (IterableDataset, DataLoader)):
        return False
    return hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")


def length_of(dataset: Any) -> int | None:
    """``len(dataset)``, or None where it has no length."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def samples_in(source: Any, already_batched: bool) -> int | None:
    """Samples of a dataset, or of the one behind a loader of ready batches; None where nothing tells."""
    return length_of(getattr(source, "dataset", None) if already_batched else source)


def fetch_function(dataset: Any, collate_fn: Collate | None) -> Fetch:
    """The fastest way that `dataset` offers from a list of indices to a micro-batch.

    That is its `get_batch(ids)` where no collator is given, else `__getitems__(ids)`, else one sample at a time.
    """
    if collate_fn is None and hasattr(dataset, "get_batch"):
        get_batch: Fetch = dataset.get_batch
        return get_batch
    collate = collate_fn or default_data_collator
    if getattr(dataset, "__getitems__", None) is not None:
        return lambda ids: collate(dataset.__getitems__(ids))
    sample_at = partial(getitem, dataset)  # with `map` no Python function is called for a sample but the dataset's
    return lambda ids: collate(list(map(sample_at, ids)))


def should_pin(pin_memory: bool) -> bool:
    """Whether pinning the host's memory is asked for and of use here."""
    return pin_memory and torch.cuda.is_available()


def pin(batch: Any) -> Any:
    """`batch` with its tensors in pinned memory, from where they reach a GPU asynchronously."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: pin(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(pin, batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(pin, batch))
    return batch


def mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values`, which has the keys of `batch`, in a mapping of the same type."""
    if type(batch) is dict:
        return values
    if isinstance(batch, MutableMapping):
        clone = copy(batch)
        clone.update(values)
        return clone
    return type(batch)(values)  # type: ignore[call-arg]


def as_it_is(batch: Any) -> Any:
    """The collator of a DataLoader whose dataset gives ready micro-batches."""
    return batch
