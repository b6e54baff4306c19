"""Tells the end of data from a `StopIteration` that escaped from a user's function, which would pass for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice, starmap
from traceback import walk_tb
from typing import Any, Final, TypeVar

from onstep.errors import DataError

T = TypeVar("T")
R = TypeVar("R")

END: Final[Any] = object()
"""What `next_item` returns at the end of an iterator."""

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
        raise _escaped_stop() from stop


def items_of(source: Iterable[T]) -> Iterator[T]:
    """The items of an iterable, up to its own end; otherwise as `next_item`."""
    iterator = iter(source)
    while (item := next_item(iterator)) is not END:
        yield item


def next_item(iterator: Iterator[T]) -> Any:
    """The next item of an iterator, or `END`.

    Raises:
        DataError: if the traceback shows that the `StopIteration` comes from a function that the iterator calls: from a
            dataset or collator that a torch DataLoader reads, or a function given to `map` and the like.
    """
    try:
        return next(iterator)
    except StopIteration as stop:
        if _has_escaped(stop, iterator):
            raise _escaped_stop() from stop
        return END


def _has_escaped(stop: StopIteration, iterator: Iterator[Any]) -> bool:
    assert stop.__traceback__ is not None
    calls = [frame.f_code.co_name for frame, _ in walk_tb(stop.__traceback__.tb_next)]  # below next_item
    if "_next_data" in calls:  # of a torch DataLoader, which raises its own there or where it fetches from an iterable
        return "_next_index" not in calls and calls[-1] not in ("_next_data", "fetch")
    return isinstance(iterator, _TRANSPARENT) and bool(calls) and calls[0] != "__next__"


def _escaped_stop() -> DataError:
    return DataError(
        "the code that reads the data raised StopIteration (see the traceback above), which would pass for the end of "
        "the data and silently drop the rest; it usually comes from next() of an exhausted iterator in a dataset, a "
        "transform or a collator: give next() a default, or catch StopIteration there"
    )
