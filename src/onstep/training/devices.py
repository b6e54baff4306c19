"""Moving micro-batches to the device that trains on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_CPU = torch.device("cpu")


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`, copied without waiting where memory is pinned.

    Tensors inside mappings, lists and tuples are found; everything else stays as it is.
    """
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        if device == _CPU and type(batch) is dict and all(getattr(v, "device", _CPU) == _CPU for v in batch.values()):
            return batch
        moved = {key: to_device(value, device) for key, value in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
