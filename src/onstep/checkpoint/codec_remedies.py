"""What to do about a value that a checkpoint has no form for."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

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
