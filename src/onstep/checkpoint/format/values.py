"""Encodes and decodes the leaf values of a state in JSON, exactly, by a fixed table of kinds; suggests substitutes.

Nothing in a document is ever imported, looked up by name outside these tables, or called.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import datetime
import math
import random
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_PLAIN_INT = 2**53
"""Every JSON reader keeps integers exact up to this bound; larger ones are written in hexadecimal."""
MAX_HEX_DIGITS = 2**18
"""An integer of a million bits."""

TORCH_DTYPES = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype
}
NUMPY_DTYPE = re.compile(
    r"[|<>](b1|[iu][1248]|f[248]|c(8|16)|[SU][1-9][0-9]{0,5}|[mM]8(\[[0-9]{0,9}[a-zA-Zμ]{1,7}\])?)"
)
"""Dtypes of plain items; excludes objects, structures and platform-dependent sizes."""
DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,5})?")
PATH_KINDS: dict[str, type[PurePath]] = {
    "path": Path,
    "pure_posix_path": PurePosixPath,
    "pure_windows_path": PureWindowsPath,
}


class MalformedError(ValueError):
    """A payload that its kind does not accept; the codec adds the path to the message."""


def expect(condition: object, rule: str) -> None:
    """Refuse a payload that violates the rule."""
    if not condition:
        raise MalformedError(rule)


def expect_members(payload: Any, members: set[str]) -> None:
    """Refuse a payload that is not an object of exactly these members."""
    expect(isinstance(payload, dict) and set(payload) == members, f"it must have exactly the members {sorted(members)}")


def shown(payload: Any) -> str:
    """A payload in a form that is safe to show in an error: truncated, and never traversed."""
    return repr(payload[:100]) if isinstance(payload, str) else type(payload).__name__


def are_plain_numbers(values: Sequence[Any]) -> bool:
    """Whether all are short integers, or all finite floats: a fast path, since there may be millions of them."""
    kinds = set(map(type, values))
    if kinds == {int}:
        return bool(max(values) <= MAX_PLAIN_INT and min(values) >= -MAX_PLAIN_INT)
    return kinds == {float} and all(map(math.isfinite, values))


def decode_plain(node: Any) -> Any:
    """A value that a document holds as plain JSON."""
    if type(node) is int:
        expect(-MAX_PLAIN_INT <= node <= MAX_PLAIN_INT, "a long integer must be written in hexadecimal")
    elif type(node) is float:
        expect(math.isfinite(node), "a float that is not finite must be written as its bits")
    elif node is not None and type(node) not in (bool, str):
        raise MalformedError(f"{type(node).__name__} is not a JSON type")
    return node


def _encode_int(value: int) -> Any:
    """A JSON number, or hexadecimal if it is long."""
    if -MAX_PLAIN_INT <= value <= MAX_PLAIN_INT:
        return value
    digits = hex(value)
    if len(digits) > MAX_HEX_DIGITS:
        raise MalformedError(f"an integer of {value.bit_length()} bits is too long for a checkpoint; save it as bytes")
    return {"int": digits}


def _decode_int(payload: Any) -> int:
    is_short = isinstance(payload, str) and len(payload) <= MAX_HEX_DIGITS
    expect(is_short and re.fullmatch("-?0x[0-9a-f]+", payload), "int requires a hexadecimal string of bounded length")
    return int(payload, 16)


def _encode_float(value: float) -> Any:
    """A JSON number (Python writes the shortest text that round-trips to the same bits), or the bits of NaN and inf."""
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


def _decode_float(payload: Any) -> float:
    expect(isinstance(payload, str) and re.fullmatch("[0-9a-f]{16}", payload), "float requires 16 hex digits")
    (value,) = struct.unpack(">d", bytes.fromhex(payload))
    return float(value)


def _encode_str(value: str) -> Any:
    """A JSON string; one with unpaired surrogates, which UTF-8 cannot encode, is stored as bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"surrogates": _base64(value.encode("utf-8", "surrogatepass"))}
    return value


def _decode_surrogates(payload: Any) -> str:
    try:
        return _unbase64(payload).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise MalformedError(f"surrogates requires UTF-8 bytes ({error.reason})") from error


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def _unbase64(payload: Any) -> bytes:
    expect(isinstance(payload, str), "bytes must be written as base64 text")
    try:
        return base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedError(f"not valid base64 ({error})") from error


def _decode_complex(payload: Any) -> complex:
    expect(isinstance(payload, list) and len(payload) == 2, "complex requires two numbers")
    real, imaginary = (part if type(part) is float and math.isfinite(part) else _decode_float(part) for part in payload)
    return complex(real, imaginary)


def _encode_complex(value: complex) -> Any:
    parts = (value.real, value.imag)
    return {"complex": [part if math.isfinite(part) else _encode_float(part)["float"] for part in parts]}


def _decode_size(payload: Any) -> torch.Size:
    valid = isinstance(payload, list) and all(type(size) is int and abs(size) < 2**63 for size in payload)
    expect(valid, "torch.Size requires a list of integers")
    return torch.Size(payload)


def _decode_torch_dtype(payload: Any) -> torch.dtype:
    expect(isinstance(payload, str) and payload in TORCH_DTYPES, f"torch has no dtype {shown(payload)}")
    return TORCH_DTYPES[payload]


def _decode_device(payload: Any) -> torch.device:
    expect(isinstance(payload, str) and DEVICE.fullmatch(payload), "torch.device requires a name and an index")
    try:
        return torch.device(payload)
    except RuntimeError as error:
        raise MalformedError(f"torch has no device {payload!r}") from error


def numpy_dtype(payload: Any) -> np.dtype[Any]:
    """The dtype of that name, provided its items are plain."""
    is_plain = isinstance(payload, str) and NUMPY_DTYPE.fullmatch(payload)
    expect(is_plain, f"NumPy dtype {shown(payload)} is not a dtype of plain items")
    try:
        dtype: np.dtype[Any] = np.dtype(payload)
    except (TypeError, ValueError) as error:
        raise MalformedError(f"NumPy has no dtype {payload!r}") from error
    return dtype


def is_plain_dtype(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of this dtype can be stored."""
    return dtype.fields is None and dtype.subdtype is None and NUMPY_DTYPE.fullmatch(dtype.str) is not None


def check_items(items: np.ndarray[Any, Any]) -> None:
    """Refuse bytes that are not a value of the dtype: bools other than 0 and 1, characters outside Unicode."""
    raw = np.ascontiguousarray(items).reshape(-1)
    if items.dtype.kind == "b":
        expect(not (raw.view(np.uint8) > 1).any(), "an array of bools has bytes other than 0 and 1")
    if items.dtype.kind == "U":
        codes = raw.view(np.dtype(items.dtype.byteorder + "u4"))
        expect(not (codes > 0x10FFFF).any(), "an array of text has characters outside Unicode")


def _encode_numpy_scalar(value: np.generic) -> Any:
    if not is_plain_dtype(value.dtype):
        raise MalformedError(f"cannot save a NumPy scalar of {value.dtype} exactly; convert it to a Python value")
    return {"numpy_scalar": [value.dtype.str, _base64(value.tobytes())]}


def _decode_numpy_scalar(payload: Any) -> Any:
    expect(isinstance(payload, list) and len(payload) == 2, "numpy_scalar requires a dtype and bytes")
    dtype, raw = numpy_dtype(payload[0]), _unbase64(payload[1])
    expect(len(raw) == dtype.itemsize, f"a scalar of {dtype} must have {dtype.itemsize} bytes, got {len(raw)}")
    items = np.frombuffer(raw, dtype)
    check_items(items)
    return items[0]


def _encode_path(kind: str, value: PurePath) -> Any:
    return {kind: _encode_str(str(value))}


def _decode_path(kind: str, payload: Any) -> PurePath:
    is_escaped = isinstance(payload, dict) and set(payload) == {"surrogates"}
    text = _decode_surrogates(payload["surrogates"]) if is_escaped else payload
    expect(isinstance(text, str), f"{kind} requires a string")
    return PATH_KINDS[kind](text)


def _encode_datetime(value: datetime.datetime) -> Any:
    text = value.isoformat()
    read = datetime.datetime.fromisoformat(text)
    if repr(read) != repr(value):
        raise MalformedError(
            f"cannot save {value!r} exactly; give it a fixed offset: .astimezone(datetime.timezone.utc)"
        )
    return {"datetime": text}


def _decode_datetime(kind: type[datetime.date], payload: Any) -> datetime.date:
    expect(isinstance(payload, str) and len(payload) <= 64, "a date or time requires an ISO 8601 string")
    try:
        return kind.fromisoformat(payload)
    except ValueError as error:
        raise MalformedError(f"{payload!r} is not a valid ISO 8601 date or time") from error


def _decode_timedelta(payload: Any) -> datetime.timedelta:
    valid = isinstance(payload, list) and [type(part) for part in payload] == [int, int, int]
    valid = valid and abs(payload[0]) <= 999_999_999 and 0 <= payload[1] < 86_400 and 0 <= payload[2] < 10**6
    expect(valid, "timedelta requires days, seconds and microseconds")
    return datetime.timedelta(*payload)


VALUE_ENCODERS: dict[type[Any], Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: _encode_complex,
    bytes: lambda value: {"bytes": _base64(value)},
    torch.Size: lambda value: {"torch.Size": list(value)},
    torch.dtype: lambda value: {"torch.dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"torch.device": str(value)},
    PosixPath: partial(_encode_path, "path"),
    WindowsPath: partial(_encode_path, "path"),
    PurePosixPath: partial(_encode_path, "pure_posix_path"),
    PureWindowsPath: partial(_encode_path, "pure_windows_path"),
    datetime.datetime: _encode_datetime,
    datetime.date: lambda value: {"date": value.isoformat()},
    datetime.timedelta: lambda value: {"timedelta": [value.days, value.seconds, value.microseconds]},
    **dict.fromkeys({np.dtype(code).type for code in "?bBhHiIlLqQefdFDSUmM"}, _encode_numpy_scalar),
}
"""By exact type: a subclass may carry extra state, so it is refused."""

VALUE_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": _decode_float,
    "surrogates": _decode_surrogates,
    "complex": _decode_complex,
    "bytes": _unbase64,
    "torch.Size": _decode_size,
    "torch.dtype": _decode_torch_dtype,
    "torch.device": _decode_device,
    **{kind: partial(_decode_path, kind) for kind in PATH_KINDS},
    "datetime": partial(_decode_datetime, datetime.datetime),
    "date": partial(_decode_datetime, datetime.date),
    "timedelta": _decode_timedelta,
    "numpy_scalar": _decode_numpy_scalar,
}


_BY_NAME = "save a name for it, and look up that name in your own table when loading"
_REMEDIES: tuple[tuple[Any, str], ...] = (
    (type, _BY_NAME),
    ((np.ndarray, np.generic), "convert it to plain items (numbers, bools, text, dates), or save it as a list"),
    (Enum, "save its .value, and call the Enum on it when loading"),
    (torch.Generator, "save its get_state()"),
    (random.Random, "save its getstate()"),
    (np.random.Generator, "save its .bit_generator.state"),
)
"""By type; the first match applies."""


def remedy_for(value: Any) -> str:
    """A suggestion of what to save instead of a value that cannot be stored."""
    if isinstance(value, Tensor):
        return _remedy_for_tensor(value)
    for kinds, remedy in _REMEDIES:
        if isinstance(value, kinds):
            return remedy
    if callable(getattr(value, "state_dict", None)):
        return "save its state_dict()"
    if dataclasses.is_dataclass(value):
        return "save dataclasses.asdict(it)"
    return _remedy_for_container(value)


def _remedy_for_tensor(tensor: Tensor) -> str:
    if tensor.is_meta:
        return "it has no values on the meta device: materialize it first"
    if tensor.is_quantized:
        return "save its int_repr(), scale and zero point"
    if tensor.layout is not torch.strided:
        return "save its to_dense(), or its indices and values"
    if tensor.dtype == torch.complex128:
        return "save torch.view_as_real(it)"
    if type(tensor) is Tensor:
        return f"convert it from {tensor.dtype} to a dtype that safetensors supports"
    return (
        "save the plain tensor inside it (for a DTensor: to_local() or full_tensor()), or DTensors as a component "
        "that is SHARDED"
    )


def _remedy_for_container(value: Any) -> str:
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return "save its _asdict()"
    for base in (bool, int, float, str, bytes, tuple, list, dict, set, frozenset):
        if isinstance(value, base):
            return f"save {base.__name__}(it); a subclass may carry extra state"
    if isinstance(value, Mapping):
        return "save dict(it); for an OmegaConf configuration, OmegaConf.to_container(it)"
    if isinstance(value, Sequence | bytearray | memoryview):
        return "save list(it) or bytes(it)"
    if callable(value):
        return _BY_NAME
    return "keep it out of the state, or save plain values and tensors from which it can be rebuilt"
