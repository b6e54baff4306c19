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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AnySet
from enum import Enum
from functools import partial
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor, nn

from onstep.training.runs.user_code import full_name, globals_in, is_users, names_in, reachable, short_name

_MAX_VALUES = 20_000
"""Values of one entry that are looked at, besides lists of numbers."""
_MAX_NUMBERS = 1_000_000
"""Length of a list of numbers that is hashed in full."""
_WHOLE_BYTES = 16 * 1024**2
"""Arrays and texts up to this size are hashed in full; of larger ones, `_BLOCKS` blocks."""
_BLOCKS = 64
_BLOCK_BYTES = 16 * 1024
_MAX_LEVELS = 12
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_WITHOUT_CONTENT = (types.ModuleType, types.BuiltinFunctionType, Iterator, torch.Generator, np.random.Generator)
_NO_SETTINGS = ("training", "name_or_path")
"""Attributes of a module that say how it is used, or where it came from."""
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)


def digest_of(value: Any, budget: int = _MAX_VALUES) -> str:
    """32 hexadecimal digits of a value: its numbers, text, arrays and attributes, and the code of functions in it."""
    feed = _Feed()
    try:
        feed.value(value, budget, 0)
    except Exception as error:  # noqa: BLE001 - an attribute of the user's object may raise anything
        feed.text(type(error).__name__)
    return feed.hexdigest()


def is_scalar(value: object) -> bool:
    """Whether a value is a single number or text, or None."""
    return isinstance(value, (*_SCALARS, Enum, np.generic, PurePath))


def sampled(length: int, limit: int) -> Sequence[int]:
    """At most `limit` positions, evenly spread, the first and last included."""
    if length <= limit:
        return range(length)
    return sorted({round(index * (length - 1) / max(1, limit - 1)) for index in range(limit)})


def arrow_digest(column: Any) -> str:
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


class _Feed:
    """Hashes values one after another."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self._seen: dict[int, tuple[int, object]] = {}
        """Objects met so far: they are hashed once, and a cycle ends there."""

    def hexdigest(self) -> str:
        return self._hasher.hexdigest(16)

    def text(self, text: str) -> None:
        self._hasher.update(text.encode("utf-8", "surrogatepass") + b"\0")

    def value(self, value: Any, budget: int, level: int) -> None:
        """Hash a value of any type.

        Args:
            value: what to hash.
            budget: how many values inside it are looked at.
            level: how deep it lies.
        """
        if is_scalar(value):
            self._scalar(value)
            return
        self.text(full_name(type(value)))
        if level > _MAX_LEVELS or self._is_known(value) or isinstance(value, type(os.environ)):
            return  # the environment holds what changes at every start
        feed = self._feed_of(value)
        if feed is not None:
            feed(self, value, budget, level + 1)
        elif callable(getattr(value, "to_numpy", None)):  # pandas
            self._value_of_pandas(value, budget, level + 1)
        elif is_arrow_dataset(value):
            for name, digest in arrow_entries(value).items():
                self.text(f"{name} {digest}")
        else:
            self._object(value, budget, level + 1)

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

    def _sequence(self, values: Sequence[Any], budget: int, level: int) -> None:
        self.text(str(len(values)))
        if isinstance(values, range):
            self.text(repr(values))
        elif len(values) > 8 and (numbers := _numbers(values)) is not None:
            self._array(numbers, budget, level)
        else:
            positions = sampled(len(values), max(1, min(4096, budget // 4)))
            for position in positions:
                self.value(values[position], budget // len(positions), level)

    def _mapping(self, values: Mapping[Any, Any], budget: int, level: int) -> None:
        self.text(str(len(values)))
        limit = max(1, budget // 2)
        chosen = set(sampled(len(values), limit))
        for position, key in enumerate(values):
            if position in chosen:
                self.value(key, 1, level)
                self.value(values[key], budget // len(chosen), level)

    def _set(self, values: AnySet[Any], budget: int, level: int) -> None:
        self.text(str(len(values)))
        if len(values) <= budget:
            for digest in sorted(digest_of(value, 16) for value in values):
                self.text(digest)

    def _array(self, array: np.ndarray[Any, Any], budget: int, level: int) -> None:
        self.text(f"{array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self._sequence(array.reshape(-1), budget, level)  # type: ignore[arg-type]
            return
        if array.nbytes <= _WHOLE_BYTES:
            self._hasher.update(np.ascontiguousarray(array).tobytes())
            return
        rows = array.reshape(-1) if array.flags.c_contiguous else array
        each = max(1, _BLOCK_BYTES * len(rows) // array.nbytes)
        for start in sampled(max(1, len(rows) - each), _BLOCKS):
            self._hasher.update(np.ascontiguousarray(rows[start : start + each]).tobytes())

    def _tensor(self, tensor: Tensor, budget: int, level: int) -> None:
        self.text(f"{tensor.dtype} {tuple(tensor.shape)}")
        self._hasher.update(tensor_bytes(tensor, _WHOLE_BYTES))

    def _module(self, module: nn.Module, budget: int, level: int) -> None:
        for line in structure(module):
            self.text(line)
        for function in {type(one): reachable(type(one), ("forward",)) for one in module.modules()}.values():
            for name, forward in function.items():
                self.text(name)
                self.value(forward, 1000, level)
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            self.text(name)
            self._hasher.update(tensor_bytes(tensor, _BLOCK_BYTES))

    def _function(self, function: types.FunctionType, budget: int, level: int) -> None:
        self.text(short_name(function))
        if not is_users(function.__module__):
            return
        self._code(function.__code__, function.__doc__)
        self.value(function.__defaults__, budget // 4, level)
        self.value(function.__kwdefaults__, budget // 4, level)
        names = names_in(function.__code__)
        for cell in function.__closure__ or ():
            try:
                self._referred(cell.cell_contents, names, budget // 4, level)
            except ValueError:  # an empty cell
                continue
        for name in sorted(globals_in(function.__code__) & function.__globals__.keys()):
            self.text(name)
            self._referred(function.__globals__[name], names, budget // 4, level)

    def _code(self, code: types.CodeType, docstring: str | None = None) -> None:
        """What code does: neither line numbers, nor names of files, nor docstrings."""
        self.text(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)))
        self.text(repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)))
        self._hasher.update(code.co_code)
        self._hasher.update(code.co_exceptiontable)
        constants = code.co_consts
        if docstring is not None and constants[:1] == (docstring,):
            constants = (None, *constants[1:])
        for constant in constants:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.value(constant, 1000, 0)

    def _referred(self, value: Any, names: set[str], budget: int, level: int) -> None:
        """A value that code refers to: of an object's attributes, only those whose names the code has."""
        if isinstance(value, types.ModuleType):
            self.text(value.__name__)
        elif isinstance(value, type):
            self._class(value, names, level)
        elif not (is_scalar(value) or callable(value) or self._feed_of(value) or is_arrow_dataset(value)):
            self.text(full_name(type(value)))
            if not self._is_known(value) and (is_users(type(value).__module__) or isinstance(value, _NAMESPACES)):
                self._mapping({name: one for name, one in attributes(value).items() if name in names}, budget, level)
        else:
            self.value(value, budget, level)

    def _class(self, cls: type, names: set[str], level: int) -> None:
        self.text(full_name(cls))
        if level <= _MAX_LEVELS and not self._is_known(cls):
            self._methods(cls, names, level)

    def _methods(self, cls: type, names: Iterable[str], level: int) -> None:
        """The user's methods of a class that code with these names may call."""
        for name, function in reachable(cls, {"__init__", "__call__", "forward", *names}).items():
            self.text(name)
            self.value(function, 1000, level + 1)

    def _any_class(self, cls: type, budget: int, level: int) -> None:
        self.text(full_name(cls))
        self._methods(cls, (), level)

    def _partial(self, value: partial[Any], budget: int, level: int) -> None:
        self.value((value.func, value.args, value.keywords), budget, level)

    def _method(self, method: types.MethodType, budget: int, level: int) -> None:
        self.value(method.__func__, budget, level)
        self._referred(method.__self__, names_in(method.__func__.__code__), budget, level)

    def _nothing(self, value: object, budget: int, level: int) -> None:
        """Of a generator, file or module only the type."""

    def _value_of_pandas(self, value: Any, budget: int, level: int) -> None:
        columns = [value[name] for name in value.columns] if hasattr(value, "columns") else [value]
        self.text(repr(list(getattr(value, "columns", ()))))
        for column in columns:
            self.value(np.asarray(column.to_numpy()), budget // len(columns), level)

    def _feed_of(self, value: object) -> Callable[..., None] | None:
        """The method that hashes values of this kind; None for a single number or any other object."""
        if isinstance(value, _WITHOUT_CONTENT) and not is_users(type(value).__module__):
            return _Feed._nothing
        if isinstance(value, (Mapping, AnySet)) and is_users(type(value).__module__) and not isinstance(value, dict):
            return None  # its items may be read from anywhere
        return next((feed for kinds, feed in self._BY_KIND if isinstance(value, kinds)), None)

    def _object(self, value: Any, budget: int, level: int) -> None:
        cls = type(value)
        if is_users(cls.__module__):
            self._methods(cls, ("__getitem__", "__iter__", "__len__"), level)
        elif not isinstance(value, (torch.utils.data.Dataset, *_NAMESPACES)):
            return  # of an installed package: its attributes may be caches
        self._mapping(attributes(value), budget, level)

    _BY_KIND: tuple[tuple[Any, Callable[..., None]], ...] = (
        (np.ndarray, _array),
        (Tensor, _tensor),
        (nn.Module, _module),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (partial, _partial),
        (type, _any_class),
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


def arrow_entries(dataset: Any) -> dict[str, str]:
    """The digest of each column of a `datasets.Dataset`, and of what selects and transforms its rows."""
    table, indices = dataset.data.table, dataset._indices
    entries = {name: arrow_digest(table.column(name)) for name in table.column_names}
    if indices is not None:
        entries["the choice of rows"] = arrow_digest(indices.table.column(0))
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
    if isinstance(values, np.ndarray) or len(values) > _MAX_NUMBERS or not isinstance(values[0], (bool, int, float)):
        return None
    if not all(isinstance(value, (bool, int, float)) for value in values):
        return None
    try:
        return np.asarray(values)
    except OverflowError:  # an integer beyond 64 bits
        return None


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)
