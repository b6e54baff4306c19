"""Saves what the code of an unmodified Trainer subclass counts and collects in its attributes, and restores it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from onstep.events import Callback
from onstep.training.protocols import StateDict

MOST_VALUES = 100_000
"""An attribute with more numbers, strings and tensors than this is not saved."""
_SCALARS = (bool, int, float, str, type(None))
_NOTHING = object()


class Owner(Protocol):
    """The part of a Trainer that is used here."""

    library_attributes: frozenset[str]


class OwnAttributes(Callback):
    """The attributes of a Trainer that are its subclass's own, consist of plain data, and change during the training.

    Counters of tokens and the metrics since the last record are such attributes. Without them, the records of a resumed
    run would differ from those of a run that was not interrupted. Each rank saves its own.
    """

    state_key = "own"

    def __init__(self, trainer: Owner) -> None:
        self._trainer = trainer
        self._at_start = dict(self._plain())

    def state_dict(self) -> StateDict:
        """The attributes that have changed, by name."""
        found = dict(self._plain())
        return {
            name: value for name, value in found.items() if not _is_equal(value, self._at_start.get(name, _NOTHING))
        }

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Set the attributes; containers keep their types."""
        own = vars(self._trainer)
        for name, value in state_dict.items():
            own[name] = _restored(own.get(name), value)

    def _plain(self) -> Iterator[tuple[str, Any]]:
        trainer = self._trainer
        ours = {name for one in type(trainer).__mro__ if one.__module__.startswith("onstep.") for name in vars(one)}
        for name, value in list(vars(trainer).items()):
            if name not in trainer.library_attributes and name not in ours:
                copied = _copied(value, iter(range(MOST_VALUES)))
                if copied is not _NOTHING:
                    yield name, copied


def _copied(value: Any, room: Iterator[int]) -> Any:
    """A copy of plain data, with lists in the place of other sequences; nothing for other objects and large ones."""
    if next(room, None) is None:
        return _NOTHING
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Tensor):
        return _NOTHING if value.requires_grad else value.detach().clone()
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        copies = {key: _copied(one, room) for key, one in value.items()}
        return _NOTHING if any(one is _NOTHING for one in copies.values()) else copies
    if isinstance(value, (list, deque)) or type(value) is tuple:
        items = [_copied(one, room) for one in value]
        return _NOTHING if any(one is _NOTHING for one in items) else items
    return _NOTHING


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    return type(one) is type(other) and (one == other or one != one)


def _restored(current: Any, saved: Any) -> Any:
    """`saved` as an object of the type of `current`, which is filled where that is possible."""
    if isinstance(current, dict) and isinstance(saved, dict):
        values = {key: _restored(current.get(key), value) for key, value in saved.items()}
        current.clear()
        current.update(values)
        return current
    if isinstance(current, (list, deque)) and isinstance(saved, list):
        current.clear()
        current.extend(saved)
        return current
    return tuple(saved) if isinstance(current, tuple) else saved
