"""What a run of a step moves, remembered so that the step can run again from the same place and with the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any, TypeVar

import torch

from onstep.checkpoint import RngState
from onstep.errors import ConfigError
from onstep.training.protocols import StateDict

Item = TypeVar("Item")


class RerunDataIterator(Iterator[Item]):
    """Passes the items of `iterable` (an iterator, a loader, a list) on, and gives those of a step again.

    Nothing is kept until `advance` was called for the first time, which a `RerunStateMachine` does where it may rerun.
    Containers are copied shallowly: a forward step may take entries out of a micro-batch, but not write into its
    tensors.
    """

    def __init__(self, iterable: Iterable[Item]) -> None:
        self._source = iter(iterable)
        self._kept: list[Item] = []
        self._next = 0
        """Which of the kept items comes next; behind them comes the source."""
        self._keeps = False

    def __next__(self) -> Item:
        if self._next < len(self._kept):
            again: Item = shallow_copy(self._kept[self._next])
            self._next += 1
            return again
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

    def state_dict(self) -> StateDict:
        """The kept micro-batches, and how many of them were given again; the position of the source is not in it."""
        return {"kept": list(self._kept), "next": self._next, "keeps": self._keeps}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Give the kept micro-batches of another iterator, then go on with this one's source."""
        self._kept = list(state_dict["kept"])
        self._next = int(state_dict["next"])
        self._keeps = bool(state_dict["keeps"])


Rewindable = RerunDataIterator[Any]


class StepSnapshot:
    """The random generators, the data iterators, and whatever else the caller saves and restores.

    Args:
        device: whose generator belongs to it, besides Python's, NumPy's and torch's.
        save: gives what else a forward pass changes, as copies; None is nothing.
        restore: takes that back, more than once.
    """

    def __init__(
        self, device: torch.device, save: Callable[[], object] | None, restore: Callable[[Any], None] | None
    ) -> None:
        if (save is None) != (restore is None):
            raise ConfigError("state_save_func and state_restore_func go together; pass both or neither.")
        self._rng = RngState(device)
        self._save, self._restore = save, restore
        self._generators: StateDict = {}
        self._extra: object = None
        self.iterators: list[Rewindable] = []

    def take(self, iterators: list[Rewindable]) -> None:
        """Remember where everything stands; the iterators keep what they give from here on."""
        self.iterators = iterators
        for one in iterators:
            one.advance()
        self._generators = self._rng.state_dict()
        self._extra = None if self._save is None else self._save()

    def go_back(self) -> None:
        """Put everything where it stood."""
        self._rng.load_state_dict(self._generators)
        if self._restore is not None:
            self._restore(self._extra)
        for one in self.iterators:
            one.rewind()


def rewindable(data_iterator: Rewindable | list[Rewindable] | None) -> list[Rewindable]:
    """The iterators to rewind for a rerun.

    Raises:
        TypeError: for one that cannot.
    """
    if data_iterator is None:
        return []
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    for one in iterators:
        if not (hasattr(one, "rewind") and hasattr(one, "advance")):
            raise TypeError(
                f"a step that may be rerun needs its data again, and {type(one).__name__} cannot rewind; pass "
                f"RerunDataIterator(...) of it, or rerun_state_machine.rerun_mode=disabled"
            )
    return iterators


def shallow_copy(item: Any) -> Any:
    """A micro-batch whose containers are new and whose tensors are the same."""
    if isinstance(item, dict):
        return {key: shallow_copy(value) for key, value in item.items()}
    if isinstance(item, list):
        return [shallow_copy(value) for value in item]
    return copy(item) if isinstance(item, set) else item
