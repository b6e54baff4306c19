"""Encodes a state as named tensors plus a typed JSON document for everything else, and decodes it again.

A document is plain JSON where JSON is exact (None, bools, short integers, finite floats, text, lists). Anything else
is an object with one member, whose name is a kind from a fixed table: `{"tuple": [1, 2]}`, `{"tensor": "exp_avg"}`.
Reading a document therefore never imports or calls anything it names; whatever is not in the table is refused.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint.format.tensor_header import DTYPE_NAMES, METADATA_KEY
from onstep.checkpoint.format.values import (
    VALUE_ENCODERS,
    MalformedError,
    are_plain_numbers,
    is_plain_dtype,
    remedy_for,
)
from onstep.distributed.shards import as_dtensor, held_part
from onstep.errors import UnsupportedStateError
from onstep.files.bounded_reading import MAX_VALUES, number_of_values

FORMAT = 1
MAX_DOCUMENT_BYTES = 256 * 1024**2
MAX_DEPTH = 64
MAX_NAME_LENGTH = 500
FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (list, dict, set, tuple, int, float, str, bool)
}
"""Permitted default factories of a defaultdict."""
KEY_TYPES = {*VALUE_ENCODERS, tuple, frozenset}


def encode_state(state: Any, where: str = "state", *, takes_shards: bool = False) -> tuple[dict[str, Tensor], Any]:
    """The tensors of a state by name, and the document that holds everything else.

    Stored exactly: None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset, deque, dict with any
    hashable keys of these types, OrderedDict, defaultdict of a built-in type, Counter, dense tensors, torch.Size, dtype
    and device, NumPy arrays and scalars of plain items, paths, dates. A tensor's name is its path in the state, so the
    tensors of a model keep their parameter names. A tensor that occurs several times, or as identical views of the same
    memory, is stored once and comes back as one object. `requires_grad` is not kept.

    The tensors share the state's memory: copy them before the state changes.

    Args:
        state: what to save.
        where: the name used for the state in errors.
        takes_shards: DTensors are among the tensors too, as they are.

    Raises:
        UnsupportedStateError: for a value that cannot be stored exactly, with its path and a remedy.
    """
    encoder = _Encoder(where, takes_shards)
    node = encoder.node(state)
    return encoder.tensors, {"onstep_state": FORMAT, "state": node}


def check_encodable(state: Any, where: str = "state") -> None:
    """Raise whatever `encode_state` would raise; call it before training starts, when nothing can be lost yet.

    Args:
        state: the state: nested dictionaries and lists of tensors, numbers and text.
        where: its name in errors.

    Raises:
        UnsupportedStateError: for a value that cannot be stored exactly, with its path and a remedy.
    """
    encode_state(state, where)


def document_to_bytes(document: Any, where: str = "state") -> bytes:
    """Serialize a document to the bytes of a JSON file.

    Raises:
        UnsupportedStateError: if it is too large.
    """
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode()
    number = number_of_values(text)
    if len(text) > MAX_DOCUMENT_BYTES or number > MAX_VALUES:
        raise UnsupportedStateError(
            f"{where}: its {number:,} non-tensor values need {len(text):,} bytes of JSON, but at most {MAX_VALUES:,} "
            f"and {MAX_DOCUMENT_BYTES:,} are allowed; store long lists as tensors or NumPy arrays."
        )
    return text


def step_name(key: Any) -> str:
    """Format a key or index as a step of a path; long ones are truncated."""
    if type(key) is str:
        return key[:MAX_NAME_LENGTH]
    is_short = type(key) in (bool, type(None), float) or (type(key) is int and abs(key) < 2**64)
    return repr(key) if is_short else type(key).__name__


def is_key(value: Any, depth: int = 0) -> bool:
    """Whether a value can be saved as a dictionary key or a set member."""
    if type(value) is tuple or type(value) is frozenset:
        return depth < MAX_DEPTH and all(is_key(item, depth + 1) for item in value)
    return type(value) in KEY_TYPES


class Walk:
    """A walk over a state or a document that tracks its current path."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._path: list[Any] = []

    def node(self, node: Any) -> Any:
        raise NotImplementedError

    def _child(self, key: Any, node: Any) -> Any:
        self._path.append(key)
        result = self.node(node)
        self._path.pop()
        return result

    def _at(self) -> str:
        return ".".join([self._where, *map(step_name, self._path)])


class _Encoder(Walk):
    """Splits a state into tensors and a JSON tree; refuses values that cannot be stored."""

    def __init__(self, where: str, takes_shards: bool = False) -> None:
        super().__init__(where)
        self._takes_shards = takes_shards
        self.tensors: dict[str, Tensor] = {}
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
        """The JSON tree of a value; collects its tensors under their paths."""
        encode = VALUE_ENCODERS.get(type(value)) or self._containers.get(type(value))
        if encode is None and self._takes_shards and isinstance(value, Tensor) and as_dtensor(value) is not None:
            encode = self._shard
        if encode is None:
            self._refuse(value)
        if len(self._path) > MAX_DEPTH:
            raise UnsupportedStateError(
                f"{self._at()}: it is nested more than {MAX_DEPTH} levels deep or contains itself; flatten it."
            )
        try:
            return encode(value)
        except MalformedError as error:
            raise UnsupportedStateError(f"{self._at()}: {error}.") from error

    def _items(self, values: Sequence[Any]) -> list[Any]:
        if are_plain_numbers(values):
            return list(values)
        return [self._child(index, value) for index, value in enumerate(values)]

    def _mapping(self, value: dict[Any, Any]) -> Any:
        """An object if all keys are strings, else a list of pairs; both preserve the order."""
        pairs = [(self._key(key), self._child(key, item)) for key, item in value.items()]
        if all(type(key) is str for key, _ in pairs):
            return dict(pairs)
        return [list(pair) for pair in pairs]

    def _ordered_dict(self, value: OrderedDict[Any, Any]) -> Any:
        items = self._mapping(value)
        if not hasattr(value, "_metadata"):
            return {"OrderedDict": items}
        # Module.state_dict() attaches the modules' versions to its result, and load_state_dict reads them from there.
        return {"state_dict": {"items": items, "versions": self._child("_metadata", value._metadata)}}

    def _defaultdict(self, value: defaultdict[Any, Any]) -> Any:
        factory = value.default_factory
        name = next((name for name, known in FACTORIES.items() if known is factory), None)
        if factory is not None and name is None:
            raise MalformedError(f"cannot save a defaultdict with factory {factory!r}; convert it with dict(...)")
        return {"defaultdict": {"factory": name, "items": self._mapping(value)}}

    def _sorted(self, values: Iterable[Any]) -> list[Any]:
        """Sorted items, so that equal sets give equal documents whatever their iteration order."""
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
            raise MalformedError("the memory of this tensor has been freed; save it while it still has values")
        place = (plain.data_ptr(), plain.device, plain.dtype, plain.shape, plain.stride())
        view = (*place, plain.is_conj(), plain.is_neg())
        return {"tensor": self._store(plain, view if plain.numel() else id(tensor))}

    def _shard(self, tensor: Tensor) -> Any:
        """A DTensor, which is one with another if both hold the same memory as the same part."""
        dtensor = as_dtensor(tensor)
        assert dtensor is not None
        local = held_part(dtensor)
        if local.layout is not torch.strided or local.is_quantized or local.is_meta or local.dtype not in DTYPE_NAMES:
            self._refuse(tensor)
        # of an empty part, only the storage has an address; where there is none, equal addresses say nothing
        storage = local.untyped_storage().data_ptr()
        place = (storage, local.storage_offset(), local.device, local.dtype, local.shape, local.stride())
        layout = (tensor.shape, dtensor.device_mesh, dtensor.placements)
        return {"tensor": self._store(tensor, (*place, *layout) if storage else id(tensor))}

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if not is_plain_dtype(array.dtype):
            self._refuse(array)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        view = (array.ctypes.data, array.dtype.str, array.shape, array.strides)
        tensor = torch.from_numpy(raw if raw.flags.writeable else raw.copy())
        name = self._store(tensor, view if array.size else id(array))
        return {"ndarray": {"dtype": array.dtype.str, "shape": list(array.shape), "tensor": name}}

    def _store(self, tensor: Tensor, identity: Any) -> str:
        """The name under which a tensor is stored; equal identities mean the same elements of the same memory."""
        known = self._names.get(identity)
        if known is None:
            known = self._names[identity] = self._unused_name()
            self.tensors[known] = tensor
        return known

    def _unused_name(self) -> str:
        """The path, made valid Unicode and unique."""
        name = ".".join(map(step_name, self._path)) or "value"
        name = name.encode("utf-8", "replace").decode()[:MAX_NAME_LENGTH]
        while name in self.tensors or name == METADATA_KEY:
            name += "#"
        return name

    def _refuse(self, value: Any, role: str = "") -> NoReturn:
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        what = f"cannot save {kind} {role}".rstrip()
        raise UnsupportedStateError(f"{self._at()}: {what}; {remedy_for(value)}.")
