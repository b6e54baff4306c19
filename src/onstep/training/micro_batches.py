"""A step's micro-batches, as a forward step draws them, on the device that trains on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from onstep.data import Batch, StepBatches
from onstep.data.fetch import mapping_like
from onstep.pulse import PULSE

_CPU = torch.device("cpu")


class MicroBatches(Iterator[Batch]):
    """A step's micro-batches as the forward step sees them; each is moved to the device right before its turn."""

    __slots__ = ("_next", "_staged", "_staged_index", "batches", "device", "items")

    def __init__(self, batches: StepBatches, device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self.items: dict[str, Any] = {}
        """What a forward step wants to remember from one micro-batch of the step to the next."""
        self._next = 0
        self._staged_index = -1
        self._staged: Batch = None

    def __len__(self) -> int:
        return len(self.batches.micro_batches)

    def is_filler(self) -> bool:
        """Whether the micro-batch that was handed out last must count as zero."""
        return self.batches.is_filler[self._next - 1]

    def stage(self, index: int) -> Batch:
        """Move micro-batch `index` to the device; the next `next()` returns it."""
        PULSE.beats += 1
        batch = to_device(self.batches.micro_batches[index], self.device)
        self._staged, self._staged_index, self._next = batch, index, index
        return batch

    def __next__(self) -> Batch:
        index = self._next
        if index != self._staged_index:  # a forward step reads beyond its own
            if index >= len(self.batches.micro_batches):
                raise StopIteration
            self.stage(index)
        self._next = index + 1
        return self._staged


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with every tensor in it on `device`, copied without waiting where memory is pinned.

    Tensors inside mappings, lists and tuples are found; everything else stays as it is.
    """
    if type(batch) is dict and device == _CPU:
        for value in batch.values():
            if getattr(value, "device", _CPU) != _CPU:
                break
        else:
            return batch
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: to_device(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
