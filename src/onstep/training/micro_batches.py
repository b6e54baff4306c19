"""A step's micro-batches, as a forward step draws them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from onstep.data import StepBatches
from onstep.pulse import PULSE
from onstep.training.devices import to_device


class MicroBatches(Iterator[Any]):
    """A step's micro-batches as the forward step sees them; each is moved to the device right before its turn."""

    def __init__(self, batches: StepBatches, device: torch.device) -> None:
        self.batches = batches
        self.device = device
        self.items: dict[str, Any] = {}
        """What a forward step wants to remember from one micro-batch of the step to the next."""
        self._next = 0
        self._staged: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return len(self.batches.micro_batches)

    def is_filler(self) -> bool:
        """Whether the micro-batch that was handed out last must count as zero."""
        return bool(self.batches.is_filler[self._next - 1])

    def stage(self, index: int) -> Any:
        """Move micro-batch `index` to the device; the next `next()` returns it."""
        PULSE.beats += 1
        batch = to_device(self.batches.micro_batches[index], self.device)
        self._staged = (index, batch)
        self._next = index
        return batch

    def __next__(self) -> Any:
        index = self._next
        if index >= len(self):
            raise StopIteration
        self._next = index + 1
        staged = self._staged
        return staged[1] if staged is not None and staged[0] == index else self.stage_and_pass(index)

    def stage_and_pass(self, index: int) -> Any:
        """Move a micro-batch that a forward step reads beyond its own."""
        batch = self.stage(index)
        self._next = index + 1
        return batch
