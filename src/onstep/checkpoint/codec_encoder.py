"""A state taken apart: what a checkpoint has a form for becomes tensors and a JSON document, all else is refused."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint.codec_values import VALUE_ENCODERS, MalformedError, are_plain_numbers, is_plain_dtype
from onstep.checkpoint.tensor_header import DTYPE_NAMES, METADATA_KEY
from onstep.errors import UnsupportedStateError

BY_NAME = "save a name for it, and look that name up in a table of your own when loading"


def remedy_for(value: Any) -> str:
    """What to save in its place."""
    if isinstance(value, Tensor):
        return _remedy_for_tensor(value)
    if isinstance(value, type):
        return BY_NAME
    if isinstance(value, np.ndarray | np.generic):
        return "convert it to plain items (numbers, bools, text, dates), or save it as a list"
    if isinstance(value, Enum):
        return "save its .value, and call the Enum on it when loading"
    if isinstance(value, torch.Generator):
        return "save its get_state()"
    if isinstance(value, random.Random):
        return "save its getstate()"
    if isinstance(value, np.random.Generator):
        return "save its .bit_generator.state"
    if callable(getattr(value, "state_dict", None)):
        return "save its state_dict()"
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict(it)"
    return _remedy_for_container(value)


def _remedy_for_tensor(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "it has no values on the meta device: materialise it first"
    if tensor.is_quantized:
        return "save its int_repr(), scale and zero point"
    if tensor.layout is not torch.strided:
        return "save to_dense(), or its indices and values"
    if tensor.dtype == torch.complex128:
        return "save torch.view_as_real(it)"
    if type(tensor) is Tensor:
        return f"convert it from {tensor.dtype} to a dtype of the safetensors format"
    return "save the plain tensor in it, for a DTensor to_local() or full_tensor()"


def _remedy_for_container(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save its _asdict()"
    for base in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset):
        if isinstance(value, base):
            return f"save {base.__name__}(it), a subclass may hold more than that"
    if isinstance(value, Mapping):
        return "save dict(it); for a configuration of OmegaConf, OmegaConf.to_container(it)"
    if isinstance(value, Sequence | bytearray | memoryview):
        return "save list(it) or bytes(it)"
    if callable(value):
        return BY_NAME
    return "keep it out of the state, or save plain values and tensors from which it can be built again"


MAX_DEPTH = 64
MAX_NAME_LENGTH = 500
FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "set": set,
    "tuple": tuple,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
}
"""What a defaultdict may make."""
KEY_TYPES = {*VALUE_ENCODERS, tuple, frozenset}


def step_name(key: Any) -> str:
    """How a key or index stands in a path; long ones are cut."""
    if type(key) is str:
        return key if len(key) <= MAX_NAME_LENGTH else key[:MAX_NAME_LENGTH]
    is_short = type(key) in (bool, type(None), float) or (type(key) is int and abs(key) < 2**64)
    return repr(key) if is_short else type(key).__name__


def is_key(value: Any, depth: int = 0) -> bool:
    """Whether a value can be a key of a dictionary, or in a set, of a checkpoint."""
    if type(value) is tuple or type(value) is frozenset:
        return depth < MAX_DEPTH and all(is_key(item, depth + 1) for item in value)
    return type(value) in KEY_TYPES


class Encoder:
    """One walk over a state."""

    def __init__(self, where: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._where = where
        self._path: list[Any] = []
        self._names: dict[Any, str] = {}
        self._containers: dict[type[Any], Callable[[Any], Any]] = {
            list: self._items,
            tuple: lambda value: {"tuple": self._items(value)},
            set: lambda value: {"set": self._sorted(value)},
            frozenset: lambda value: {"frozenset": self._sorted(value)},
            deque: lambda value: {"deque": {"maxlen": value.maxlen, "items": self._items(value)}},
            dict: lambda value: {"dict": self._mapping(value)},
            Counter: lambda value: {"Counter": self._mapping(value)},
            OrderedDict: self._ordered_dict,
            defaultdict: self._defaultdict,
            Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            np.ndarray: self._array,
        }

    def node(self, value: Any) -> Any:
        """The JSON tree of a value; its tensors are collected under their paths.

        Raises:
            UnsupportedStateError: with the path of what has no form.
        """
        encode = VALUE_ENCODERS.get(type(value)) or self._containers.get(type(value))
        if encode is None:
            self._refuse(value)
        if len(self._path) > MAX_DEPTH:
            raise UnsupportedStateError(
                f"{self._at()}: it is nested deeper than {MAX_DEPTH} levels, or contains itself; flatten it."
            )
        try:
            return encode(value)
        except MalformedError as error:
            raise UnsupportedStateError(f"{self._at()}: {error}.") from error

    def _child(self, key: Any, value: Any) -> Any:
        self._path.append(key)
        node = self.node(value)
        self._path.pop()
        return node

    def _items(self, values: Sequence[Any]) -> list[Any]:
        if are_plain_numbers(values):
            return list(values)
        return [self._child(index, value) for index, value in enumerate(values)]

    def _mapping(self, value: dict[Any, Any]) -> Any:
        """An object if all keys are text, else a list of pairs; both keep the order."""
        pairs = [(self._key(key), self._child(key, item)) for key, item in value.items()]
        if all(type(key) is str for key, _ in pairs):
            return dict(pairs)
        return [list(pair) for pair in pairs]

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> Any:
        items = self._mapping(value)
        if not hasattr(value, "_metadata"):
            return {"OrderedDict": items}
        # Module.state_dict() hangs the versions of the modules on its result, and load_state_dict reads them there.
        return {"state_dict": {"items": items, "versions": self._child("_metadata", value._metadata)}}

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = next((name for name, known in FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise MalformedError(f"a defaultdict that makes {factory!r} has no form in a checkpoint; save dict(it)")
        return {"defaultdict": {"factory": name, "items": self._mapping(value)}}

    def _sorted(self, values: Iterable[Any]) -> list[Any]:
        """Equal sets become equal documents, in whatever order they are walked."""
        return sorted((self._key(value) for value in values), key=lambda node: json.dumps(node, sort_keys=True))

    def _key(self, key: Any) -> Any:
        if not is_key(key):
            self._refuse(key, "as a key or in a set")
        return self._child("key", key)

    def _tensor(self, tensor: Tensor) -> Any:
        plain = tensor.detach()
        if plain.layout is not torch.strided or plain.is_quantized or plain.is_meta or plain.dtype not in DTYPE_NAMES:
            self._refuse(tensor)
        if plain.numel() and plain.data_ptr() == 0:
            raise MalformedError("the memory of this tensor was freed; save it while its values are there")
        view = (
            plain.data_ptr(),
            plain.device,
            plain.dtype,
            plain.shape,
            plain.stride(),
            plain.is_conj(),
            plain.is_neg(),
        )
        return {"tensor": self._store(plain, view if plain.numel() else id(tensor))}

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if not is_plain_dtype(array.dtype):
            self._refuse(array)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        view = (array.ctypes.data, array.dtype.str, array.shape, array.strides)
        name = self._store(
            torch.from_numpy(raw if raw.flags.writeable else raw.copy()), view if array.size else id(array)
        )
        return {"ndarray": {"dtype": array.dtype.str, "shape": list(array.shape), "tensor": name}}

    def _store(self, tensor: Tensor, identity: Any) -> str:
        """The name under which a tensor is stored; equal identities are the same elements of the same memory."""
        known = self._names.get(identity)
        if known is None:
            known = self._names[identity] = self._unused_name()
            self.tensors[known] = tensor
        return known

    def _unused_name(self) -> str:
        """The path, made valid text and unique."""
        name = ".".join(map(step_name, self._path)) or "value"
        name = name.encode("utf-8", "replace").decode()[:MAX_NAME_LENGTH]
        while name in self.tensors or name == METADATA_KEY:
            name += "#"
        return name

    def _at(self) -> str:
        return ".".join([self._where, *map(step_name, self._path)])

    def _refuse(self, value: Any, role: str = "") -> NoReturn:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        what = f"a checkpoint has no form for {kind} {role}".rstrip()
        raise UnsupportedStateError(f"{self._at()}: {what}; {remedy_for(value)}.")
