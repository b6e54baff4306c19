"""Snapshots the state that a step changes, so that it can run again from the same state with the same data."""

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
    """Passes on the items of `iterable` (an iterator, a loader, a list), and can repeat those of a step.

    Nothing is kept until the first call of `advance`, which a `RerunStateMachine` makes if it may rerun. Containers are
    copied shallowly: a forward step may remove entries from a micro-batch, but must not modify its tensors.
    """

    def __init__(self, iterable: Iterable[Item]) -> None:
        self._source = iter(iterable)
        self._kept: list[Item] = []
        self._next = 0
        """Index of the next kept item; after the last one, the source is read."""
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
        """Repeat everything since the last `advance`."""
        self._next = 0

    def advance(self) -> None:
        """Discard the items already passed on; keep what comes next."""
        del self._kept[: self._next]
        self._next = 0
        self._keeps = True

    def state_dict(self) -> StateDict:
        """The kept micro-batches, and how many of them were repeated; excludes the position of the source."""
        return {"kept": list(self._kept), "next": self._next, "keeps": self._keeps}

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Repeat the kept micro-batches of another iterator, then continue with this one's source."""
        self._kept = list(state_dict["kept"])
        self._next = int(state_dict["next"])
        self._keeps = bool(state_dict["keeps"])


Rewindable = RerunDataIterator[Any]


class StepSnapshot:
    """Saves and restores the random generators, the data iterators, and whatever else the caller specifies.

    Args:
        device: the device whose generator is included, besides Python's, NumPy's and torch's.
        save: returns copies of what else a forward pass changes; None means nothing.
        restore: restores those copies; may be called more than once.
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
        """Save the current state; from here on the iterators keep what they pass on."""
        self.iterators = iterators
        for one in iterators:
            one.advance()
        self._generators = self._rng.state_dict()
        self._extra = None if self._save is None else self._save()

    def go_back(self) -> None:
        """Restore the saved state."""
        self._rng.load_state_dict(self._generators)
        if self._restore is not None:
            self._restore(self._extra)
        for one in self.iterators:
            one.rewind()


def rewindable(data_iterator: Rewindable | list[Rewindable] | None) -> list[Rewindable]:
    """The iterators to rewind for a rerun.

    Raises:
        TypeError: for one that cannot be rewound.
    """
    if data_iterator is None:
        return []
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    for one in iterators:
        if not (hasattr(one, "rewind") and hasattr(one, "advance")):
            raise TypeError(
                f"a step that may be rerun must read its data again, but {type(one).__name__} cannot rewind; wrap it "
                f"in RerunDataIterator(...), or set rerun_state_machine.rerun_mode=disabled"
            )
    return iterators


def shallow_copy(item: Any) -> Any:
    """A micro-batch with new containers and the same tensors."""
    if isinstance(item, dict):
        return {key: shallow_copy(value) for key, value in item.items()}
    if isinstance(item, list):
        return [shallow_copy(value) for value in item]
    return copy(item) if isinstance(item, set) else item
