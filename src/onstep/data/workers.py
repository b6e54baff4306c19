"""Worker processes that end when they are no longer needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader


def batches_from_workers(loader: DataLoader[Any]) -> Iterator[Any]:
    """One pass over `loader`, whose workers end with it, also after an error, unless they are persistent."""
    iterator = iter(loader)
    try:
        yield from iterator
    finally:
        if not loader.persistent_workers:
            end_workers(iterator)


def end_workers(iterator: Any) -> None:
    """End the worker processes of an iterator of a DataLoader.

    Torch has no public name for it. Without, they end when the iterator is collected, which after an error comes late
    and takes five seconds; a public `close` would let this go.
    """
    iterator._shutdown_workers()
