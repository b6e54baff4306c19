"""Runs an optimizer's step so that it updates nothing while the gate is closed, if possible without a read of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from onstep.optim.finite_gate import DeviceFiniteGate, FiniteGate
from onstep.optim.fused_step import FusedStep, fuse
from onstep.optim.guarded_step import GuardedStep
from onstep.optim.low_precision import LowPrecisionOptimizer
from onstep.optim.muon import MuonWithAdamW


class GatedStep:
    """The step of an optimizer, with what a gate on an accelerator requires.

    The gate's flag is handed to an optimizer that accepts it; AdamW, Adam and SGD are made fused for that if they leave
    the choice to torch. Torch's other optimizers are guarded. Where neither is possible, the flag must be read first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, gate: FiniteGate) -> None:
        self.must_read = False
        """Whether the caller must know that the gate is open before the next step."""
        self._optimizer, self._gate = optimizer, gate
        self._plain = FusedStep(optimizer)
        self.run: Callable[[], None] = self._plain
        """Runs the step."""
        self._guard: GuardedStep | None = None
        gate.when_closed.append(self.settle)
        if isinstance(optimizer, LowPrecisionOptimizer):
            optimizer.step_of = lambda: gate.step

    def survey(self, *, spans_devices: bool) -> None:
        """Choose how to run the step, now that the optimizer's parameters, groups or state have changed."""
        optimizer, gate = self._optimizer, self._gate
        if not isinstance(gate, DeviceFiniteGate):
            return
        self.run, self.must_read = self._plain, True  # the first step creates the optimizer's state
        if not spans_devices:
            fuse(optimizer)
            if _accepts_flag(optimizer):
                self.run = self._run_with_flag
            elif GuardedStep.supports(optimizer):
                self._guard = self._guard or GuardedStep(optimizer)
                self.run = self._run_guarded

    def settle(self) -> None:
        """Restore what a guarded optimizer has counted in steps that updated nothing. Waits for the device.

        The gate does not learn of it: not all ranks may be asked for their state, but all must learn at the same step.
        """
        if self._guard is not None:
            self._guard.restore_counters()

    def _run_with_flag(self) -> None:
        gate, own = self._gate, vars(self._optimizer)
        assert isinstance(gate, DeviceFiniteGate)
        if not gate.is_current:  # else the host knows that it is open
            own["found_inf"] = gate.found_inf
        try:
            self._plain()
        finally:
            own.pop("found_inf", None)  # it must not hold back steps outside of a training
        self.must_read = False

    def _run_guarded(self) -> None:
        gate, guard = self._gate, self._guard
        assert isinstance(gate, DeviceFiniteGate)
        assert guard is not None
        if not gate.is_current and guard.is_possible():
            guard(gate.found_inf)
            gate.poll()  # counters on the host are remembered for a limited number of steps
        elif gate.is_current or not gate.found_inf.item():  # a hook on one rank must not tell its gate alone
            self._plain()
        self.must_read = False


def _accepts_flag(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it honours an attribute `found_inf`: weights, state and step counts stay as they are while it is 1."""
    if isinstance(optimizer, MuonWithAdamW):
        return optimizer.accepts_flag
    is_fused = all(group.get("fused", True) for group in optimizer.param_groups)
    return is_fused and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
