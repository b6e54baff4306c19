"""Counts, step by step, what makes the host wait for its device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onstep import Callback

READS = ("_local_scalar_dense", "item", "is_nonzero", "equal")
COPIES = ("_to_copy", "copy_")


def device_of(value: Any) -> torch.device | None:
    return value.device if isinstance(value, torch.Tensor) else None


class ReadCounter(TorchDispatchMode):
    """Counts, by the step that is going on, the operators that make the host wait: reads and copies off a device."""

    def __init__(self) -> None:
        super().__init__()
        self.step: int | None = None
        self.reads: Counter[tuple[int, str]] = Counter()
        self.num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        crosses = name in COPIES and device_of(result) != device_of(args[1] if name == "copy_" else args[0])
        if self.step is not None:
            self.num_operators += 1
            self.reads[self.step, name] += name in READS or crosses
        return result

    def by_step(self) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for (step, _), count in self.reads.items():
            counts[step] += count
        return dict(counts)


class StepMarker(Callback):
    """Tells the counter which step is going on, from one `on_step_begin` to the next."""

    def __init__(self, counter: ReadCounter) -> None:
        self.counter = counter

    def on_step_begin(self, context: Any) -> None:
        self.counter.step = context.state.train_state.step + 1

    def on_epoch_end(self, context: Any) -> None:
        self.counter.step = None
