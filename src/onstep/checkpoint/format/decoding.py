"""Rebuilds a state from its tensors and its document, and refuses whatever is not in the table of kinds."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from onstep.checkpoint.format.codec import FACTORIES, FORMAT, MAX_DEPTH, Walk, is_key
from onstep.checkpoint.format.values import (
    VALUE_DECODERS,
    MalformedError,
    are_plain_numbers,
    check_items,
    decode_plain,
    expect,
    expect_members,
    numpy_dtype,
    shown,
)
from onstep.errors import CheckpointError
from onstep.files.bounded_reading import DIGITS_OF_64_BITS, parse_json

_LEVELS_OF_JSON = 4
"""Maximum number of levels of the document for a level of the state."""


def decode_state(tensors: Mapping[str, Tensor], document: Any, where: str = "state") -> Any:
    """Rebuild the state that was passed to `encode_state`. The result uses the memory of the tensors passed in.

    Args:
        tensors: the tensors of the file, by name.
        document: the rest of the state as JSON, which refers to them.
        where: its name in errors.

    Raises:
        CheckpointError: for a document that is malformed or does not match the tensors.
    """
    decoder = _Decoder(tensors, where)
    if not isinstance(document, dict) or set(document) != {"onstep_state", "state"}:
        decoder.refuse("a state must have the members 'onstep_state' and 'state'")
    if type(document["onstep_state"]) is not int or document["onstep_state"] != FORMAT:
        raise CheckpointError(
            f"{where}: its format is {shown(document['onstep_state'])}, but this version reads {FORMAT}; load it with "
            f"the version of Onstep that wrote it."
        )
    state = decoder.node(document["state"])
    unused = sorted(set(tensors) - decoder.used)
    if unused:
        raise CheckpointError(f"{where}: its document does not mention {len(unused)} tensors, first {unused[0]!r}.")
    return state


def document_from_bytes(text: bytes, where: str = "state") -> Any:
    """Parse the bytes of a JSON file into a document for `decode_state`.

    Raises:
        CheckpointError: for anything but strict JSON.
    """
    return parse_json(
        text,
        where,
        error=CheckpointError,
        max_digits=DIGITS_OF_64_BITS,
        max_nesting=_LEVELS_OF_JSON * MAX_DEPTH,
        allows_constants=False,
    )


class _Decoder(Walk):
    """Rebuilds a state; a malicious JSON tree can cause nothing worse than an error."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        super().__init__(where)
        self.used: set[str] = set()
        """Names of the tensors used so far."""
        self._tensors = tensors
        self._arrays: dict[Any, np.ndarray[Any, Any]] = {}
        self._kinds: dict[str, Callable[[Any], Any]] = {
            **VALUE_DECODERS,
            "tuple": lambda payload: tuple(self._items(payload)),
            "set": lambda payload: set(self._unique(payload)),
            "frozenset": lambda payload: frozenset(self._unique(payload)),
            "deque": self._deque,
            "dict": self._mapping,
            "Counter": lambda payload: Counter(self._mapping(payload)),
            "OrderedDict": lambda payload: OrderedDict(self._mapping(payload)),
            "state_dict": self._state_dict,
            "defaultdict": self._defaultdict,
            "tensor": self._tensor,
            "ndarray": self._array,
        }

    def node(self, node: Any) -> Any:
        try:
            if isinstance(node, dict):
                return self._tagged(node)
            return self._items(node) if isinstance(node, list) else decode_plain(node)
        except MalformedError as error:
            self.refuse(str(error))

    def refuse(self, reason: str) -> NoReturn:
        """Raise the decoding error, with the path."""
        raise CheckpointError(f"{self._at()}: {reason}; the document is damaged or was not written by Onstep.")

    def _tagged(self, node: dict[str, Any]) -> Any:
        expect(len(node) == 1, f"an object in a document must have one member, its kind, got {len(node)}")
        ((kind, payload),) = node.items()
        decode = self._kinds.get(kind)
        if decode is None:
            raise MalformedError(f"{shown(kind)} is not a kind of value known to this version")
        return decode(payload)

    def _child(self, key: Any, node: Any) -> Any:
        expect(len(self._path) < MAX_DEPTH, f"it is nested more than {MAX_DEPTH} levels deep")
        return super()._child(key, node)

    def _items(self, payload: Any) -> list[Any]:
        expect(isinstance(payload, list), "items must be written as a list")
        if are_plain_numbers(payload):
            return list(payload)
        return [self._child(index, node) for index, node in enumerate(payload)]

    def _unique(self, payload: Any) -> list[Any]:
        expect(isinstance(payload, list), "items must be written as a list")
        values = [self._key(node) for node in payload]
        expect(len(set(values)) == len(values), "a set contains an item twice")
        return values

    def _key(self, node: Any) -> Any:
        key = self._child("key", node)
        expect(is_key(key), f"a {type(key).__name__} cannot be a key or a set member")
        return key

    def _mapping(self, payload: Any) -> dict[Any, Any]:
        if isinstance(payload, dict):
            return {key: self._child(key, node) for key, node in payload.items()}
        expect(isinstance(payload, list), "a mapping must be written as an object or a list of pairs")
        result: dict[Any, Any] = {}
        for pair in payload:
            expect(isinstance(pair, list) and len(pair) == 2, "a mapping must be written as a list of pairs")
            key = self._key(pair[0])
            expect(key not in result, "a key occurs twice")
            result[key] = self._child(key, pair[1])
        return result

    def _state_dict(self, payload: Any) -> OrderedDict[Any, Any]:
        expect_members(payload, {"items", "versions"})
        state = OrderedDict(self._mapping(payload["items"]))
        state._metadata = self._child("_metadata", payload["versions"])  # type: ignore[attr-defined]
        return state

    def _defaultdict(self, payload: Any) -> defaultdict[Any, Any]:
        expect_members(payload, {"factory", "items"})
        name = payload["factory"]
        expect(name is None or (isinstance(name, str) and name in FACTORIES), "a defaultdict must make a plain type")
        return defaultdict(None if name is None else FACTORIES[name], self._mapping(payload["items"]))

    def _deque(self, payload: Any) -> deque[Any]:
        expect_members(payload, {"maxlen", "items"})
        items, maxlen = self._items(payload["items"]), payload["maxlen"]
        fits = maxlen is None or (type(maxlen) is int and len(items) <= maxlen < 2**63)
        expect(fits, f"a deque of {len(items)} items cannot have the given maxlen")
        return deque(items, maxlen)

    def _tensor(self, name: Any) -> Tensor:
        expect(isinstance(name, str), "a tensor must be written as its name")
        expect(name in self._tensors, f"its tensor {shown(name)} is missing")
        self.used.add(name)
        return self._tensors[name]

    def _array(self, payload: Any) -> np.ndarray[Any, Any]:
        expect_members(payload, {"dtype", "shape", "tensor"})
        raw, dtype, shape = self._tensor(payload["tensor"]), numpy_dtype(payload["dtype"]), payload["shape"]
        expect(raw.dtype == torch.uint8 and raw.dim() == 1, "an array must be stored in a tensor of bytes")
        valid = isinstance(shape, list) and len(shape) <= 32 and all(type(n) is int and 0 <= n < 2**31 for n in shape)
        expect(valid and math.prod(max(n, 1) for n in shape) < 2**48, "an array must have at most 32 dimensions")
        expect(
            math.prod(shape) * dtype.itemsize == raw.numel(),
            f"{raw.numel()} bytes are not an array of {dtype} with shape {shape}",
        )
        identity = (payload["tensor"], dtype.str, tuple(shape))
        if identity not in self._arrays:
            array = raw.cpu().contiguous().numpy().view(dtype).reshape(shape)
            check_items(array)
            self._arrays[identity] = array
        return self._arrays[identity]
