"""Reads a state into the tensors of this rank, whole or parts of DTensors: what it holds, one tensor at a time."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onstep.checkpoint.components import StateComponent
from onstep.checkpoint.format.codec import step_name
from onstep.checkpoint.format.stored_tensors import StoredTensor
from onstep.distributed.boxes import Box, box_of, whole_box
from onstep.distributed.shards import as_dtensor, held_part
from onstep.errors import CheckpointError

NAMES_SHOWN = 5
"""The number of names that an error lists."""

Path = tuple[Any, ...]


@dataclass(frozen=True)
class _Target:
    """A part of a stored tensor, and where it goes."""

    stored: StoredTensor
    box: Box
    destination: Tensor


class Filling:
    """The reading of a component's state into the tensors that it is to have here; nothing is read before `fill`.

    Args:
        component: what is loaded.
        outline: its stored state, with meta tensors in place of those that are in files.
        places: what is stored for each meta tensor, by `id`.

    Raises:
        CheckpointError: for tensors that have no counterpart, or one of another shape or dtype.
    """

    def __init__(self, component: StateComponent, outline: Any, places: Mapping[int, StoredTensor]) -> None:
        self._places = places
        self._targets: list[_Target] = []
        self._new: dict[int, Tensor] = {}
        self._problems: list[str] = []
        self.state = self._filled(outline, _destinations(component, outline, places), ())
        """What `load_state_dict` gets; its tensors have their values after `fill`."""
        if self._problems:
            more = len(self._problems) - NAMES_SHOWN
            texts = self._problems[:NAMES_SHOWN] + ([f"{more} more"] if more > 0 else [])
            raise CheckpointError(
                f"the stored tensors do not fit those of this run: {'; '.join(texts)}. Build what was saved, or load "
                f"another checkpoint."
            )

    def fill(self) -> None:
        """Read the values.

        Raises:
            CheckpointError: if a file cannot be read.
        """
        seen = set()
        for target in self._targets:
            place = (target.destination.data_ptr(), target.destination.shape, target.stored.name)
            if target.box.numel and place not in seen:
                target.stored.read_into(target.destination, target.box)
                seen.add(place)

    def _filled(self, stored: Any, given: Any, path: Path) -> Any:
        """The state with tensors in place of the meta tensors of the outline."""
        if isinstance(stored, Tensor) and id(stored) in self._places:
            return self._tensor(stored, given, path)
        items = [self._filled(item, _at(given, step), (*path, step)) for step, item in _steps(stored)]
        return _with_items(stored, items)

    def _tensor(self, meta: Tensor, given: Any, path: Path) -> Tensor:
        stored = self._places[id(meta)]
        if not isinstance(given, Tensor) or given.is_meta:
            if id(meta) not in self._new:
                self._new[id(meta)] = torch.empty(stored.shape, dtype=stored.dtype)
                self._targets.append(_Target(stored, whole_box(stored.shape), self._new[id(meta)]))
            return self._new[id(meta)]
        if given.shape != stored.shape or given.dtype != stored.dtype:
            here, there = (f"{tuple(one.shape)} of {one.dtype}" for one in (given, stored))
            self._problems.append(f"{_named(path)} is {here} here, and {there} in the checkpoint")
            return given
        box = box_of(given)
        if box is not None:
            self._targets.append(_Target(stored, box, held_part(given)))
        return given


def _destinations(component: StateComponent, outline: Any, places: Mapping[int, StoredTensor]) -> Any:
    """The tensors that a component wants to be filled: see `Stateful`."""
    own = getattr(component.stateful, "destinations", None)
    if callable(own):
        return own(outline)
    state = component.stateful.state_dict()
    lacking = [
        _named(path)
        for path, value in _leaves(state, ())
        if isinstance(value, Tensor) and as_dtensor(value) is not None and not _is_stored(outline, path)
    ]
    if lacking:
        more = f" and {len(lacking) - NAMES_SHOWN} more" if len(lacking) > NAMES_SHOWN else ""
        raise CheckpointError(
            f"it has no {', '.join(lacking[:NAMES_SHOWN])}{more}, which would keep the values of before; load a "
            f"checkpoint that was saved with them."
        )
    return _fitting(outline, state, places)


def _fitting(stored: Any, own: Any, places: Mapping[int, StoredTensor]) -> Any:
    """The outline with those of one's own tensors that the stored values fit; `load_state_dict` gets others whole."""
    if isinstance(stored, Tensor) and id(stored) in places:
        fits = isinstance(own, Tensor) and (own.shape, own.dtype) == (stored.shape, stored.dtype)
        is_shard = isinstance(own, Tensor) and as_dtensor(own) is not None
        return own if fits or is_shard else stored
    return _with_items(stored, [_fitting(item, _at(own, step), places) for step, item in _steps(stored)])


def _is_stored(outline: Any, path: Path) -> bool:
    for step in path:
        outline = _at(outline, step)
    return isinstance(outline, Tensor)


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    steps = list(_steps(value))
    for step, item in steps:
        yield from _leaves(item, (*path, step))
    if not steps:
        yield path, value


def _steps(value: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container of those that a checkpoint can hold, by key or index."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple, deque)):
        yield from enumerate(value)


def _at(value: Any, step: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(step)
    if isinstance(value, (list, tuple, deque)) and isinstance(step, int):
        return value[step] if 0 <= step < len(value) else None
    return None


def _with_items(container: Any, items: list[Any]) -> Any:
    """A container of the same kind with other items; itself if they are its own, or it has none."""
    steps = list(_steps(container))
    if all(item is own for item, (_, own) in zip(items, steps, strict=True)):
        return container
    if isinstance(container, MutableMapping):
        changed = copy.copy(container)
        changed.update(zip((step for step, _ in steps), items, strict=True))
        return changed
    return deque(items, container.maxlen) if isinstance(container, deque) else type(container)(items)


def _named(path: Path) -> str:
    return ".".join(map(step_name, path)) or "the state"
