"""From tensors by name and a typed JSON tree back to the state; whatever the tree says, the worst is an error."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint.codec_encoder import FACTORIES, MAX_DEPTH, is_key, step_name
from onstep.checkpoint.codec_values import (
    MAX_PLAIN_INT,
    VALUE_DECODERS,
    MalformedError,
    are_plain_numbers,
    check_items,
    expect,
    numpy_dtype,
    shown,
)
from onstep.errors import CheckpointError


class Decoder:
    """One walk over a document."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.used: set[str] = set()
        """Names of the tensors met so far."""
        self._tensors = tensors
        self._where = where
        self._path: list[Any] = []
        self._arrays: dict[Any, np.ndarray[Any, Any]] = {}
        self._kinds: dict[str, Callable[[Any], Any]] = {
            **VALUE_DECODERS,
            "tuple": lambda payload: tuple(self._items(payload)),
            "set": lambda payload: set(self._unique(payload)),
            "frozenset": lambda payload: frozenset(self._unique(payload)),
            "deque": self._deque,
            "dict": self._mapping,
            "Counter": self._counter,
            "OrderedDict": lambda payload: OrderedDict(self._mapping(payload)),
            "state_dict": self._state_dict,
            "defaultdict": self._defaultdict,
            "tensor": self._tensor,
            "ndarray": self._array,
        }

    def node(self, node: Any) -> Any:
        """The value of a JSON tree.

        Raises:
            CheckpointError: with the path of what is malformed.
        """
        try:
            if isinstance(node, dict):
                return self._tagged(node)
            if isinstance(node, list):
                return self._items(node)
            return _plain(node)
        except MalformedError as error:
            self.refuse(str(error))

    def refuse(self, reason: str) -> NoReturn:
        """Raise the one error of decoding, with the path."""
        path = ".".join([self._where, *map(step_name, self._path)])
        raise CheckpointError(f"{path}: {reason}; the document is damaged or not one of ours.")

    def _tagged(self, node: dict[str, Any]) -> Any:
        expect(len(node) == 1, f"an object of a document has one member, its kind, got {len(node)}")
        ((kind, payload),) = node.items()
        decode = self._kinds.get(kind)
        if decode is None:
            raise MalformedError(f"{shown(kind)} is no kind of value that this version knows")
        return decode(payload)

    def _child(self, key: Any, node: Any) -> Any:
        expect(len(self._path) < MAX_DEPTH, f"it is nested deeper than {MAX_DEPTH} levels")
        self._path.append(key)
        value = self.node(node)
        self._path.pop()
        return value

    def _items(self, payload: Any) -> list[Any]:
        expect(isinstance(payload, list), "items are written as a list")
        if are_plain_numbers(payload):
            return list(payload)
        return [self._child(index, node) for index, node in enumerate(payload)]

    def _unique(self, payload: Any) -> list[Any]:
        expect(isinstance(payload, list), "items are written as a list")
        values = [self._key(node) for node in payload]
        expect(len(set(values)) == len(values), "an item of a set occurs twice")
        return values

    def _key(self, node: Any) -> Any:
        key = self._child("key", node)
        expect(is_key(key), f"a {type(key).__name__} cannot be a key or in a set")
        return key

    def _mapping(self, payload: Any) -> dict[Any, Any]:
        if isinstance(payload, dict):
            return {key: self._child(key, node) for key, node in payload.items()}
        expect(isinstance(payload, list), "a mapping is written as an object or a list of pairs")
        result: dict[Any, Any] = {}
        for pair in payload:
            expect(isinstance(pair, list) and len(pair) == 2, "a mapping is written as a list of pairs")
            key = self._key(pair[0])
            expect(key not in result, "a key occurs twice")
            result[key] = self._child(key, pair[1])
        return result

    def _counter(self, payload: Any) -> Counter[Any]:
        counter: Counter[Any] = Counter()
        counter.update(self._mapping(payload))
        return counter

    def _state_dict(self, payload: Any) -> OrderedDict[Any, Any]:
        _expect_members(payload, {"items", "versions"})
        state = OrderedDict(self._mapping(payload["items"]))
        state._metadata = self._child("_metadata", payload["versions"])  # type: ignore[attr-defined]
        return state

    def _defaultdict(self, payload: Any) -> defaultdict[Any, Any]:
        _expect_members(payload, {"factory", "items"})
        name = payload["factory"]
        expect(name is None or (isinstance(name, str) and name in FACTORIES), "a defaultdict makes a plain type")
        return defaultdict(None if name is None else FACTORIES[name], self._mapping(payload["items"]))

    def _deque(self, payload: Any) -> deque[Any]:
        _expect_members(payload, {"maxlen", "items"})
        items, maxlen = self._items(payload["items"]), payload["maxlen"]
        fits = maxlen is None or (type(maxlen) is int and len(items) <= maxlen < 2**63)
        expect(fits, f"a deque of {len(items)} items cannot have the given maxlen")
        return deque(items, maxlen)

    def _tensor(self, name: Any) -> Tensor:
        expect(isinstance(name, str), "a tensor is written as its name")
        expect(name in self._tensors, f"its tensor {shown(name)} is missing")
        self.used.add(name)
        return self._tensors[name]

    def _array(self, payload: Any) -> np.ndarray[Any, Any]:
        _expect_members(payload, {"dtype", "shape", "tensor"})
        raw, dtype, shape = self._tensor(payload["tensor"]), numpy_dtype(payload["dtype"]), payload["shape"]
        expect(raw.dtype == torch.uint8 and raw.dim() == 1, "an array lies in a tensor of bytes")
        valid = isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
        expect(valid and math.prod(max(n, 1) for n in shape) < 2**48, "an array has a shape of at most 32 sizes")
        expect(math.prod(shape) * dtype.itemsize == raw.numel(), f"{raw.numel()} bytes are no {dtype} of shape {shape}")
        identity = (payload["tensor"], dtype.str, tuple(shape))
        if identity not in self._arrays:
            array = raw.cpu().contiguous().numpy().view(dtype).reshape(shape)
            check_items(array)
            self._arrays[identity] = array
        return self._arrays[identity]


def _plain(node: Any) -> Any:
    if type(node) is int:
        expect(-MAX_PLAIN_INT <= node <= MAX_PLAIN_INT, "a long integer is written in hexadecimal")
    elif type(node) is float:
        expect(math.isfinite(node), "a float that is not finite is written as its bits")
    elif node is not None and type(node) not in (bool, str):
        raise MalformedError(f"{type(node).__name__} is no type of JSON")
    return node


def _expect_members(payload: Any, members: set[str]) -> None:
    expect(isinstance(payload, dict) and set(payload) == members, f"it must have {sorted(members)} and nothing else")
