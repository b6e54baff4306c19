"""An iterator whose last micro-batches can be had again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any


class RerunDataIterator(Iterator[Any]):
    """Passes the items of `iterable` (an iterator, a loader, a list) on, and gives those of a step again.

    Nothing is kept until `advance` was called for the first time, which a `RerunStateMachine` does where it may rerun.
    Containers are copied shallowly: a forward step may take entries out of a micro-batch, but not write into its
    tensors.
    """

    def __init__(self, iterable: Iterable[Any]) -> None:
        self._source = iter(iterable)
        self._kept: list[Any] = []
        self._next = 0
        """Which of the kept items comes next; behind them comes the source."""
        self._keeps = False

    def __next__(self) -> Any:
        if self._next < len(self._kept):
            item = self._kept[self._next]
            self._next += 1
            return shallow_copy(item)
        item = next(self._source)
        if self._keeps:
            self._kept.append(shallow_copy(item))
            self._next += 1
        return item

    def rewind(self) -> None:
        """Give everything since the last `advance` again."""
        self._next = 0

    def advance(self) -> None:
        """Forget what was given; what comes next is kept."""
        del self._kept[: self._next]
        self._next = 0
        self._keeps = True

    def state_dict(self) -> dict[str, Any]:
        """The kept micro-batches, and how many of them were given again; the position of the source is not in it."""
        return {"kept": list(self._kept), "next": self._next, "keeps": self._keeps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give the kept micro-batches of another iterator, then go on with this one's source."""
        self._kept = list(state_dict["kept"])
        self._next = int(state_dict["next"])
        self._keeps = bool(state_dict["keeps"])


def shallow_copy(item: Any) -> Any:
    """A micro-batch whose containers are new and whose tensors are the same."""
    if isinstance(item, dict):
        return {key: shallow_copy(value) for key, value in item.items()}
    if isinstance(item, list):
        return [shallow_copy(value) for value in item]
    return copy(item) if isinstance(item, set) else item
