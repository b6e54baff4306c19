"""Tells the end of data from a `StopIteration` that escaped from a user's function, which would pass for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, starmap
from pathlib import PurePath
from traceback import walk_tb
from typing import Any, TypeVar

from torch.utils.data import Dataset

from onstep.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

_TRANSPARENT = (map, filter, zip, enumerate, chain, islice, starmap)
"""Iterators that end with any `StopIteration` of a function that they call."""


def call(function: Callable[[T], R], argument: T) -> R:
    """`function(argument)`.

    Raises:
        DataError: instead of a `StopIteration`, which would end the loop over the data without a word.
    """
    try:
        return function(argument)
    except StopIteration as stop:
        raise escaped_stop() from stop


def items_of(source: Iterable[T]) -> Iterator[T]:
    """The items of an iterable, up to its own end; see `check_end`."""
    iterator = started(source)
    while True:
        try:
            item = next(iterator)
        except StopIteration as stop:
            check_end(stop, iterator)
            return
        yield item


def has_items(dataset: Any) -> bool:
    """Whether samples can be read by index: the `__getitem__` of torch's `Dataset` itself only raises an error."""
    item = getattr(type(dataset), "__getitem__", None)
    return hasattr(dataset, "__getitem__") and item is not Dataset.__getitem__


def started(source: Iterable[T]) -> Iterator[T]:
    """`iter(source)`.

    Raises:
        DataError: for an object that cannot be iterated, and for what worker processes cannot be given.
    """
    if not hasattr(source, "__iter__") and not has_items(source):
        raise DataError(
            f"a {type(source).__name__} is not a dataset: it must have __getitem__(index) and __len__(), or __iter__()"
        )
    try:
        return iter(source)
    except Exception as error:
        if isinstance(error, TypeError) and str(error).startswith("iter() returned non-iterator"):
            raise DataError(
                f"{type(source).__name__}.__iter__ returned an object that is not an iterator ({error}); yield the "
                f"samples in it, or return iter(...)"
            ) from error
        files = [PurePath(frame.f_code.co_filename).parts[-2:] for frame, _ in walk_tb(error.__traceback__)]
        if ("multiprocessing", "reduction.py") not in files:
            raise
        raise DataError(
            f"the data cannot be handed to worker processes, which are not forked and so receive it pickled: {error}; "
            f"define the dataset, its transforms and the collator at the top level of a module instead of as a lambda "
            f"or inside a function, or read without workers (dataset.num_workers=0)"
        ) from error


def check_end(stop: StopIteration, iterator: Iterator[Any]) -> None:
    """Check that a `StopIteration`, caught around `next(iterator)` itself, is the iterator's own.

    Raises:
        DataError: if its traceback shows that it comes from a function that the iterator calls: from a dataset or
            collator that a torch DataLoader reads, or a function given to `map` and the like.
    """
    assert stop.__traceback__ is not None
    calls = [frame.f_code.co_name for frame, _ in walk_tb(stop.__traceback__.tb_next)]
    if "_next_data" in calls:  # of a torch DataLoader, which raises its own there or where it fetches from an iterable
        has_escaped = "_next_index" not in calls and calls[-1] not in ("_next_data", "fetch")
    else:
        has_escaped = isinstance(iterator, _TRANSPARENT) and bool(calls) and calls[0] != "__next__"
    if has_escaped:
        raise escaped_stop() from stop


def escaped_stop() -> DataError:
    """The error for a `StopIteration` that is not the end of the data."""
    return DataError(
        "the code that reads the data raised StopIteration (see the traceback above), which would pass for the end of "
        "the data and silently drop the rest; it usually comes from next() of an exhausted iterator in a dataset, a "
        "transform or a collator: give next() a default, or catch StopIteration there"
    )
