"""An accelerator emulated in host memory: its finite gate, a kernel that CUDA lacks, and the waits of the host."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import onstep.optim.megatron_optimizer
import onstep.optim.optimizer
from onstep import Callback
from onstep.optim import DeviceFiniteGate

TORCHS_OPTIMIZERS = os.path.dirname(torch.optim.__file__)
_check = torch._amp_foreach_non_finite_check_and_unscale_


def lack_bfloat16_check(patch: pytest.MonkeyPatch) -> None:
    """Take away the kernel that CUDA does not have (pytorch#127176)."""

    def check(values: list[Tensor], found_inf: Tensor, scale: Tensor) -> None:
        if any(value.dtype is torch.bfloat16 for value in values):
            raise NotImplementedError('"_amp_foreach_non_finite_check_and_unscale_cuda" not implemented for BFloat16')
        _check(values, found_inf, scale)

    patch.setattr(torch, "_amp_foreach_non_finite_check_and_unscale_", check)


def use_device_gate(patch: pytest.MonkeyPatch) -> None:
    """Give every optimizer the gate of an accelerator."""
    for module in (onstep.optim.optimizer, onstep.optim.megatron_optimizer):
        patch.setattr(module, "finite_gate", DeviceFiniteGate)


class WaitCounter(Callback):
    """Counts, by step, whatever makes the host wait: reads of a tensor, and of a flag whose copy has only begun.

    Reads of a copy that was begun in an earlier step are counted as `late`. Torch's unfused optimizers keep their
    counts of steps on the host, so what they read is not counted.
    """

    READS = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__")

    def __init__(self) -> None:
        self.step = 0
        self.waits: Counter[int] = Counter()
        self.late: Counter[int] = Counter()
        self._is_inside = False

    def on_step_begin(self, context: Any) -> None:
        self.step = context.state.train_state.step + 1

    def on_epoch_end(self, context: Any) -> None:
        self.step = 0

    def of_steps(self, first: int, last: int) -> int:
        """All waits in these steps."""
        return sum(count for step, count in self.waits.items() if first <= step <= last)

    @contextmanager
    def counting(self) -> Iterator[WaitCounter]:
        """Count while the context is open."""
        with pytest.MonkeyPatch.context() as patch:
            for name in self.READS:
                patch.setattr(Tensor, name, self._counted(getattr(Tensor, name)))
            self._watch_copies(patch)
            yield self

    def _counted(self, read: Any) -> Any:
        def counted(tensor: Tensor, *args: Any) -> Any:
            is_torchs = sys._getframe(1).f_code.co_filename.startswith(TORCHS_OPTIMIZERS)
            if is_torchs or self._is_inside:  # float() calls item()
                return read(tensor, *args)
            self._is_inside = True
            self.waits[self.step] += 1
            try:
                return read(tensor, *args)
            finally:
                self._is_inside = False

        return counted

    def _watch_copies(self, patch: pytest.MonkeyPatch) -> None:
        start, finish, begun = DeviceFiniteGate._start_copy, DeviceFiniteGate._finish_copy, {}

        def start_copy(gate: DeviceFiniteGate) -> None:
            begun[id(gate)] = self.step
            start(gate)

        def finish_copy(gate: DeviceFiniteGate) -> None:
            of_this_step = begun.get(id(gate)) == self.step
            (self.waits if of_this_step else self.late)[self.step] += 1
            finish(gate)

        patch.setattr(DeviceFiniteGate, "_start_copy", start_copy)
        patch.setattr(DeviceFiniteGate, "_finish_copy", finish_copy)
