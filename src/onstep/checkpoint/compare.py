"""Compares two checkpoints: their components, tensors and plain values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint.catalog.discovery import CheckpointInfo
from onstep.checkpoint.components import WHOLE
from onstep.checkpoint.format.codec import step_name
from onstep.checkpoint.loading import Outline, StoredState, read_outline, stored_states
from onstep.record import WALL_CLOCK_FIELDS

S = TypeVar("S")
T = TypeVar("T")

CHUNK_ITEMS = 2**22
"""Number of elements compared at a time, in float64."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of two checkpoints, A and B; for a tensor in only one of them, the other's fields are None."""

    state: str
    """The component, with the rank or group if there are several: `model`, `rng/rank_0`."""
    name: str
    dtypes: tuple[torch.dtype | None, torch.dtype | None]
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    is_equal: bool
    """Same dtype, shape and bits."""
    norms: tuple[float | None, float | None]
    """Euclidean norms over all elements."""
    largest: float | None = None
    """The largest |a - b|; NaN where one is NaN and the other is not. None for tensors of different shapes."""
    relative: float | None = None
    """The norm of a - b divided by the larger of the two norms: 0 means equal, 1 as far apart as from zero."""


def compare_tensors(state: str, name: str, a: Tensor | None, b: Tensor | None) -> TensorDifference:
    """Compare two CPU tensors; None stands for a missing one."""
    shapes: tuple[Any, Any] = _of_both(a, b, lambda one: tuple(one.shape))
    dtypes = _of_both(a, b, lambda one: one.dtype)
    norms = _of_both(a, b, _norm)
    largest = relative = None
    is_equal = False
    if a is not None and b is not None and shapes[0] == shapes[1]:
        is_equal = a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        largest, distance = (0.0, 0.0) if is_equal else _distance(a, b)
        larger = max(norm or 0.0 for norm in norms)
        relative = distance / larger if larger > 0 else distance
    return TensorDifference(state, name, dtypes, shapes, is_equal, norms, largest, relative)


def _of_both(a: S | None, b: S | None, look: Callable[[S], T]) -> tuple[T | None, T | None]:
    """`look` applied to both; None for a missing one."""
    return (None if a is None else look(a), None if b is None else look(b))


def _norm(tensor: Tensor) -> float:
    total = sum((float(_wide(part).abs().square().sum()) for part in _parts(tensor)), 0.0)
    return float(total**0.5)


def _distance(a: Tensor, b: Tensor) -> tuple[float, float]:
    """The largest |a - b| and the norm of a - b; both 0 for empty tensors."""
    largest = torch.zeros((), dtype=torch.float64)
    squares = torch.zeros((), dtype=torch.float64)
    for one, other in zip(_parts(a), _parts(b), strict=True):
        x, y = _wide(one), _wide(other)
        is_same = (x == y) | (x.isnan() & y.isnan())  # covers infinities, whose difference would be NaN
        gaps = torch.where(is_same, 0.0, (x - y).abs())
        largest = torch.maximum(largest, gaps.max())
        squares += gaps.square().sum()
    return largest.item(), squares.sqrt().item()


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return torch.split(tensor.reshape(-1), CHUNK_ITEMS) if tensor.numel() else ()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs between A and B."""

    state: str
    """The component, with the rank or group if there are several."""
    path: str
    """Path within the state; '' is the state as a whole."""
    old: str
    """As displayed."""
    new: str
    is_incidental: bool = False
    """It depends on the clock or on the run directory, so two equivalent runs differ in it too."""


@dataclass(frozen=True)
class ComponentComparison:
    """A component of two checkpoints; None for the one that lacks it."""

    key: str
    patterns: tuple[str | None, str | None]
    ranks: tuple[int | None, int | None]
    """How many ranks saved it."""
    sizes: tuple[int | None, int | None]
    """Bytes."""
    is_equal: bool = True
    """Apart from incidental differences."""


@dataclass
class Comparison:
    """Two checkpoints side by side."""

    a: CheckpointInfo
    b: CheckpointInfo
    components: list[ComponentComparison] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    """Tensors that differ, and with `everything` also equal ones; in the order of the states."""
    values: list[ValueDifference] = field(default_factory=list)
    num_tensors: int = 0
    """Tensors in the union of both, counting tied ones once; 0-d tensors count as values instead."""

    @property
    def is_equal(self) -> bool:
        """Whether all components are equal, apart from incidental differences."""
        return all(component.is_equal for component in self.components)


def compare(a: CheckpointInfo, b: CheckpointInfo, *, everything: bool = False) -> Comparison:
    """Compare two verified checkpoints, holding at most one tensor of each in memory at a time.

    Args:
        a: the checkpoint that counts as old.
        b: the checkpoint that counts as new.
        everything: report equal tensors too; they are then read to compute their norms.

    Raises:
        CheckpointError: for a file that Onstep did not write or that is damaged.
    """
    result = Comparison(a, b)
    in_a = {state.label: state for state in stored_states(a.manifest)}
    in_b = {state.label: state for state in stored_states(b.manifest)}
    walk = _Walk(result, everything)
    for label in in_a | in_b:
        walk.compare_states(label, in_a.get(label), in_b.get(label))
    different = {one.state.partition("/")[0] for one in result.tensors if not one.is_equal}
    different |= {one.state.partition("/")[0] for one in result.values if not one.is_incidental}
    result.components = list(_components(a, b, different))
    return result


class _Walk:
    """A comparison in progress, state by state; collects the differences in its result."""

    def __init__(self, result: Comparison, everything: bool) -> None:
        self._result = result
        self._everything = everything
        self._directories = (_own_dirs(result.a), _own_dirs(result.b))
        self._outlines = (_NOTHING, _NOTHING)
        self._seen: set[tuple[int, int]] = set()
        self._label = ""

    def compare_states(self, label: str, stored_a: StoredState | None, stored_b: StoredState | None) -> None:
        """Compare a state that at least one of the two has."""
        a, b, self._label = self._result.a, self._result.b, label
        outline_a = _NOTHING if stored_a is None else read_outline(a, stored_a)
        outline_b = _NOTHING if stored_b is None else read_outline(b, stored_b)
        if stored_a is None or stored_b is None:
            self._result.num_tensors += outline_a.num_tensors + outline_b.num_tensors
            old, new = ("missing" if one is None else "present" for one in (stored_a, stored_b))
            self._note("", old, new)
        elif self._everything or _digests(a, stored_a) != _digests(b, stored_b):
            self._outlines, self._seen = (outline_a, outline_b), set()
            self._compare(
                _named_like(outline_a.state, outline_b.state), _named_like(outline_b.state, outline_a.state), ()
            )
        else:
            self._result.num_tensors += outline_a.num_tensors

    def _compare(self, a: Any, b: Any, path: tuple[str, ...]) -> None:
        a = {} if a is _ABSENT and isinstance(b, Mapping) and b else a
        b = {} if b is _ABSENT and isinstance(a, Mapping) and a else b
        if _is_large(a) or _is_large(b):
            self._compare_tensors(a, b, path)
        elif isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in {**a, **b}:
                self._compare(a.get(key, _ABSENT), b.get(key, _ABSENT), (*path, step_name(key)))
        elif _is_nested(a) and _is_nested(b) and type(a) is type(b):
            if len(a) != len(b):
                self._note(".".join(path), f"{len(a)} items", f"{len(b)} items")
            for index, (one, other) in enumerate(zip(a, b, strict=False)):
                self._compare(one, other, (*path, str(index)))
        elif not _same(a, b):
            old, new = _shown(a), _shown(b)
            if old == new:
                old, new = f"{_kind(a)} {old}", f"{_kind(b)} {new}"
            self._note(".".join(path), old, new, path[-1] if path else "", (a, b))

    def _compare_tensors(self, a: Any, b: Any, path: tuple[str, ...]) -> None:
        """Compare tensors still in their files, tied ones once; a non-tensor counterpart counts as missing."""
        if (id(a), id(b)) in self._seen:
            return
        self._seen.add((id(a), id(b)))
        self._result.num_tensors += 1
        (outline_a, outline_b), name = self._outlines, ".".join(path)
        tensor_a = outline_a.read(a) if _is_large(a) else None
        tensor_b = outline_b.read(b) if _is_large(b) else None
        found = compare_tensors(self._label, name, tensor_a, tensor_b)
        if self._everything or not found.is_equal:
            self._result.tensors.append(found)

    def _note(self, path: str, old: str, new: str, key: str = "", values: tuple[Any, Any] = (None, None)) -> None:
        is_clock = any(fnmatchcase(key, field) for field in WALL_CLOCK_FIELDS)
        incidental = is_clock or _same_in_own_dirs(values, self._directories)
        self._result.values.append(ValueDifference(self._label, path, old, new, incidental))


def _named_like(state: Any, other: Any) -> Any:
    """An optimizer's state whose parameters are numbered, with the names that the other one has for them."""
    members, names = _members(state), _members(other)
    is_numbered = all(type(number) is int for number in members)
    if not members or len(members) != len(names) or not (is_numbered and all(isinstance(name, str) for name in names)):
        return state
    name_of = dict(zip(members, names, strict=True))
    groups = [{**group, "params": [name_of[number] for number in group["params"]]} for group in state["param_groups"]]
    values = {name_of.get(number, number): value for number, value in state["state"].items()}
    return {**state, "state": values, "param_groups": groups}


def _members(state: Any) -> list[Any]:
    """The parameters in the groups of an optimizer's state; none for another state."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    if not isinstance(groups, list) or not isinstance(state.get("state"), Mapping):
        return []
    return [param for group in groups if isinstance(group, Mapping) for param in group.get("params", ())]


_ABSENT = object()
"""Placeholder for a key that a dictionary lacks."""
_NOTHING = Outline(None, {})


def _components(a: CheckpointInfo, b: CheckpointInfo, different: set[str]) -> Iterator[ComponentComparison]:
    in_a, in_b = a.manifest.components, b.manifest.components
    for key in in_a | in_b:
        one, other = in_a.get(key), in_b.get(key)
        patterns = _of_both(one, other, lambda entry: entry.sharing_pattern)
        ranks = _of_both(one, other, lambda entry: len(entry.ranks))
        sizes = _of_both(one, other, lambda entry: entry.size_bytes)
        are_alike = patterns[0] == patterns[1] or all(pattern in WHOLE for pattern in patterns)
        yield ComponentComparison(key, patterns, ranks, sizes, is_equal=are_alike and key not in different)


def _digests(info: CheckpointInfo, stored: StoredState) -> dict[str, str]:
    return {name.removeprefix(stored.label): info.manifest.files[name].blake3 for name in stored.files}


def _is_large(value: Any) -> bool:
    """Whether the value is a tensor that was left in its file."""
    return isinstance(value, Tensor) and value.is_meta


def _is_nested(value: Any) -> bool:
    """Whether to compare a sequence item by item; sequences of numbers and strings are compared as a whole."""
    return isinstance(value, (list, tuple, deque)) and any(
        isinstance(item, (Mapping, list, tuple, deque, Tensor, np.ndarray)) for item in value
    )


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return compare_tensors("", "", a, b).is_equal
    if isinstance(a, np.ndarray):
        assert isinstance(b, np.ndarray)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, (set, frozenset)):
        return bool(a == b)
    return repr(a) == repr(b)  # NaN is NaN, -0.0 is not 0.0, and 1 in a list is not True


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "missing"
    if isinstance(value, Tensor):
        return str(value.item())
    if isinstance(value, np.ndarray):
        return f"array {value.shape} of {value.dtype}"
    if isinstance(value, (Mapping, list, tuple, deque, set, frozenset)) and len(value) > 8:
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _own_dirs(info: CheckpointInfo) -> list[str]:
    """Possible prefixes of paths inside the run directory of the checkpoint."""
    run = info.manifest.config_section("run")
    named = [Path(str(run.get("output_dir")), str(run.get("name")))] if run else []
    there = [info.path.parents[1]] if len(info.path.parents) > 1 else []
    directories = {str(directory) for directory in (*named, *there, *(one.absolute() for one in (*named, *there)))}
    return sorted((directory for directory in directories if len(directory) > 1), key=len, reverse=True)


def _same_in_own_dirs(values: tuple[Any, Any], directories: tuple[list[str], list[str]]) -> bool:
    """Whether two paths are the same relative to their own run directories."""
    texts = [str(value) if isinstance(value, (str, Path)) else None for value in values]
    rests = [
        next((text.removeprefix(directory) for directory in own if text.startswith(f"{directory}/")), None)
        if text
        else None
        for text, own in zip(texts, directories, strict=True)
    ]
    return rests[0] is not None and rests[0] == rests[1]
