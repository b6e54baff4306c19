"""Digests of the values and code that a user trains with: stable across processes, and bounded in time.

Nothing of the user's is called, and no item of a dataset is read through its `__getitem__`, which may be slow, random,
or advance a generator. Large values are sampled: what is hashed of them depends on their size alone.
"""

from __future__ import annotations

import argparse
import os
import re
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from onstep.training.runs.user_code import full_name, is_users, names_in, reachable, short_name

_MOST_VALUES = 100_000
"""Values that are looked at, besides lists of numbers."""
_MOST_ELEMENTS, _FEWER = 4096, 8
"""Elements of a container that are looked at; of one inside another, so many times fewer."""
_MOST_NUMBERS = 1_000_000
"""Length of a list of numbers that is hashed in full."""
_WHOLE_BYTES = 16 * 1024**2
"""Arrays and texts up to this size are hashed in full; of larger ones, `_BLOCKS` blocks."""
_BLOCKS = 64
_BLOCK_BYTES = 16 * 1024
_MAX_LEVELS = 12
_SCALARS = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, PurePath)
_WITHOUT_CONTENT = (types.BuiltinFunctionType, Iterator, torch.Generator, np.random.Generator, type(os.environ))
"""Of a generator or a file only the type is hashed; the environment holds what changes at every start."""
_NO_SETTINGS = ("training", "name_or_path")
"""Attributes of a module that say how it is used, or where it came from."""
_OPEN = (argparse.Namespace, types.SimpleNamespace, torch.utils.data.Dataset)
"""Objects of installed packages whose attributes are their content; those of others may be caches."""


def digest_of(value: Any) -> str:
    """32 hexadecimal digits of a value: its numbers, text, arrays and attributes, and the code of functions in it."""
    digest = _Digest()
    try:
        digest.add(value)
    except Exception as error:  # noqa: BLE001 - an attribute of the user's object may raise anything
        digest.text(type(error).__name__)
    return digest.hexdigest()


def is_scalar(value: object) -> bool:
    """Whether a value is a single number or text, or None."""
    return isinstance(value, _SCALARS)


def sampled(length: int, limit: int) -> Sequence[int]:
    """At most `limit` positions, evenly spread, the first and last included."""
    if length <= limit:
        return range(length)
    return sorted({round(index * (length - 1) / max(1, limit - 1)) for index in range(limit)})


class _Digest:
    """Hashes values one after another."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self._seen: dict[int, tuple[int, object]] = {}
        """Objects met so far: they are hashed once, and a cycle ends there."""
        self._level, self._num_values = 0, 0

    def hexdigest(self) -> str:
        return self._hasher.hexdigest(16)

    def text(self, text: str) -> None:
        self._hasher.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def add(self, value: Any, names: Collection[str] | None = None) -> None:
        """Hash a value of any type.

        Args:
            value: what to hash.
            names: of the code that refers to the value: of an object or a class, only what they name counts.
        """
        self._num_values += 1
        if is_scalar(value):
            self._scalar(value)
            return
        if isinstance(value, types.ModuleType):
            self.text(value.__name__)
            return
        self.text(full_name(type(value)))
        if self._num_values > _MOST_VALUES or self._level > _MAX_LEVELS or self._is_known(value):
            return
        self._level += 1
        self._content(value, names)
        self._level -= 1

    def _content(self, value: Any, names: Collection[str] | None) -> None:
        is_own = is_users(type(value).__module__)
        if isinstance(value, _WITHOUT_CONTENT) and not is_own:
            return
        is_read = is_own and isinstance(value, (Mapping, AnySet)) and not isinstance(value, dict)  # from anywhere
        add = None if is_read else next((add for kinds, add in self._BY_KIND if isinstance(value, kinds)), None)
        if add is not None:
            add(self, value)
        elif isinstance(value, type):
            self._class(value, names or ())
        elif callable(getattr(value, "to_numpy", None)):  # pandas
            columns = {name: value[name] for name in getattr(value, "columns", ())} or {"": value}
            self._mapping({name: np.asarray(column.to_numpy()) for name, column in columns.items()})
        elif is_arrow_dataset(value):
            self._mapping(arrow_entries(value))
        elif is_own or isinstance(value, _OPEN):
            if is_own:
                self._methods(type(value), ("__getitem__", "__iter__", "__len__") if names is None else names)
            own = attributes(value)
            self._mapping({name: own[name] for name in own if names is None or name in names})

    def _scalar(self, value: Any) -> None:
        if isinstance(value, (str, bytes)) and len(value) > _WHOLE_BYTES:
            value = (len(value), [value[at : at + _BLOCK_BYTES] for at in sampled(len(value) - _BLOCK_BYTES, _BLOCKS)])
        self.text(f"{type(value).__name__} {value!r}")

    def _is_known(self, value: object) -> bool:
        if id(value) in self._seen:
            self.text(f"again {self._seen[id(value)][0]}")
            return True
        self._seen[id(value)] = len(self._seen), value  # kept, so that its id stays its own
        return False

    def _chosen(self, length: int) -> Sequence[int]:
        """The positions of a container that are looked at."""
        self.text(str(length))
        return sampled(length, max(16, _MOST_ELEMENTS // _FEWER ** (self._level - 1)))

    def _sequence(self, values: Sequence[Any]) -> None:
        if isinstance(values, range):
            self.text(repr(values))
        elif len(values) > 8 and (numbers := _numbers(values)) is not None:
            self._array(numbers)
        else:
            for position in self._chosen(len(values)):
                self.add(values[position])

    def _mapping(self, values: Mapping[Any, Any]) -> None:
        chosen = set(self._chosen(len(values)))
        for position, key in enumerate(values):
            if position in chosen:
                self.add(key)
                self.add(values[key])

    def _set(self, values: AnySet[Any]) -> None:
        self.text(str(len(values)))
        for digest in sorted(map(digest_of, values)) if len(values) <= _MOST_ELEMENTS else ():
            self.text(digest)

    def _array(self, array: np.ndarray[Any, Any]) -> None:
        self.text(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self._sequence(array.reshape(-1))  # type: ignore[arg-type]
            return
        if array.nbytes <= _WHOLE_BYTES:
            self._hasher.update(np.ascontiguousarray(array).tobytes())
            return
        rows = array.reshape(-1) if array.flags.c_contiguous else array
        each = max(1, _BLOCK_BYTES * len(rows) // array.nbytes)
        for start in sampled(max(1, len(rows) - each), _BLOCKS):
            self._hasher.update(np.ascontiguousarray(rows[start : start + each]).tobytes())

    def _tensor(self, tensor: Tensor) -> None:
        self.text(tensor_digest(tensor, _WHOLE_BYTES))

    def _module(self, module: nn.Module) -> None:
        for line in structure(module):
            self.text(line)
        for cls in dict.fromkeys(type(one) for one in module.modules()):
            self._methods(cls, ("forward",))
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.text(f"{name} {tensor_digest(tensor, _BLOCK_BYTES)}")

    def _function(self, function: types.FunctionType) -> None:
        self.text(short_name(function))
        if not is_users(function.__module__):
            return
        names = names_in(function.__code__)
        self._code(function.__code__, function.__doc__)
        self.add((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # an empty cell
                continue
            self.add(value, names)
        for name in sorted(names & function.__globals__.keys()):
            self.text(name)
            self.add(function.__globals__[name], names)

    def _code(self, code: types.CodeType, docstring: str | None = None) -> None:
        """What code does: neither line numbers, nor names of files, nor docstrings."""
        self.text(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)))
        self.text(repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)))
        self._hasher.update(code.co_code + code.co_exceptiontable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            elif docstring is None or constant != docstring:
                self.add(constant)

    def _class(self, cls: type, names: Iterable[str]) -> None:
        self.text(full_name(cls))
        self._methods(cls, names)

    def _methods(self, cls: type, names: Iterable[str]) -> None:
        """The user's methods of a class that code with these names may call."""
        for name, function in reachable(cls, {"__init__", "__call__", "forward", *names}).items():
            self.text(name)
            self.add(function)

    def _partial(self, value: partial[Any]) -> None:
        self.add((value.func, value.args, value.keywords))

    def _method(self, method: types.MethodType) -> None:
        self.add(method.__func__)
        self.add(method.__self__, names_in(method.__func__.__code__))

    _BY_KIND: tuple[tuple[Any, Callable[..., None]], ...] = (
        (np.ndarray, _array),
        (Tensor, _tensor),
        (nn.Module, _module),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (partial, _partial),
        (Mapping, _mapping),
        (AnySet, _set),
        ((list, tuple, deque, range, bytearray), _sequence),
    )


def structure(module: nn.Module) -> list[str]:
    """A line for each part of a module: its name, class and settings."""
    lines = []
    for name, one in module.named_modules():
        own = {key: value for key, value in vars(one).items() if is_scalar(value) and key not in _NO_SETTINGS}
        settings = {key: value for key, value in own.items() if not key.startswith("_")}
        lines.append(f"{name} {full_name(type(one))} {_without_addresses(one.extra_repr())} {sorted(settings.items())}")
    return lines


def tensor_bytes(tensor: Tensor, limit: int) -> bytes:
    """The bytes of a tensor, or of evenly spread elements of one with more than `limit` bytes; b'' if it has none."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):  # of a sharded tensor, this rank's part
        tensor = tensor.to_local()
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return b""
    flat = tensor.reshape(-1)
    if tensor.nbytes > limit:
        blocks = _BLOCKS if limit >= _WHOLE_BYTES else 8
        each = max(1, limit // blocks // tensor.element_size())
        flat = torch.cat([flat[start : start + each] for start in sampled(max(1, len(flat) - each), blocks)])
    return flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()


def tensor_digest(tensor: Tensor, limit: int) -> str:
    """32 hexadecimal digits of a tensor's type, shape and content, sampled if it has more than `limit` bytes."""
    hasher = blake3()
    try:
        hasher.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor_bytes(tensor, limit))
    except (RuntimeError, TypeError, NotImplementedError) as error:  # not initialized yet, or of a special kind
        hasher.update(type(error).__name__.encode())
    return hasher.hexdigest(16)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, by name, from `__dict__` and `__slots__`."""
    slots = [name for cls in type(value).__mro__ for name in _as_names(vars(cls).get("__slots__", ()))]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name) and name != "__dict__"}
    return dict(sorted({**found, **getattr(value, "__dict__", {})}.items()))


def _arrow_digest(column: Any) -> str:
    """The content of a column of a pyarrow table, sampled if it is large."""
    import pyarrow as pa

    hasher = blake3(f"{column.type} {len(column)}".encode())
    if column.nbytes <= _WHOLE_BYTES:
        slices = [column]
    else:
        slices = [column.slice(start, 16) for start in sampled(max(1, len(column) - 16), _BLOCKS)]
    for one in slices:
        array = one.combine_chunks()
        for chunk in array.chunks if isinstance(array, pa.ChunkedArray) else [array]:
            hasher.update(pa.RecordBatch.from_arrays([chunk], ["column"]).serialize())
    return hasher.hexdigest(16)


def arrow_entries(dataset: Any) -> dict[str, str]:
    """The digest of each column of a `datasets.Dataset`, and of what selects and transforms its rows."""
    table, indices = dataset.data.table, dataset._indices
    entries = {name: _arrow_digest(table.column(name)) for name in table.column_names}
    if indices is not None:
        entries["the choice of rows"] = _arrow_digest(indices.table.column(0))
    shown = dataset.format
    entries["the format"] = digest_of((shown.get("type"), shown.get("columns"), shown.get("format_kwargs")))
    return entries


def is_arrow_dataset(value: object) -> bool:
    """Whether a value is a `datasets.Dataset`, recognized without importing `datasets`."""
    return any(one.__module__ == "datasets.arrow_dataset" and one.__name__ == "Dataset" for one in type(value).__mro__)


def _as_names(slots: Any) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _numbers(values: Sequence[Any]) -> np.ndarray[Any, Any] | None:
    """A sequence of numbers as an array; None for any other."""
    if isinstance(values, np.ndarray) or len(values) > _MOST_NUMBERS or not isinstance(values[0], (bool, int, float)):
        return None
    if not all(isinstance(value, (bool, int, float)) for value in values):
        return None
    try:
        return np.asarray(values)
    except OverflowError:  # an integer beyond 64 bits
        return None


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)
