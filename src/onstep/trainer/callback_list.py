"""The callbacks of a manager as a list that can be changed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, overload

from onstep.events import CallbackManager


class CallbackList(MutableSequence[object]):
    """The callbacks of a manager as a list: changing it changes which callbacks are called."""

    def __init__(self, manager: CallbackManager) -> None:
        self._manager = manager

    def __len__(self) -> int:
        return len(self._manager.callbacks)

    @overload
    def __getitem__(self, index: int) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: int | slice) -> object:
        return self._manager.callbacks[index]

    def __setitem__(self, index: Any, value: object) -> None:
        callbacks = self._manager.callbacks
        callbacks[index] = value
        self._manager.replace(callbacks)

    def __delitem__(self, index: int | slice) -> None:
        callbacks = self._manager.callbacks
        del callbacks[index]
        self._manager.replace(callbacks)

    def insert(self, index: int, value: object) -> None:
        """Add a callback, or a callback class, before the one at `index`."""
        callbacks = self._manager.callbacks
        callbacks.insert(index, value)
        self._manager.replace(callbacks)

    def __iter__(self) -> Iterator[object]:
        return iter(self._manager.callbacks)

    def __add__(self, other: Iterable[object]) -> list[object]:
        return [*self, *other]

    def __radd__(self, other: Iterable[object]) -> list[object]:
        return [*other, *self]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, CallbackList)) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._manager.callbacks)
