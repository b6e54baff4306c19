"""Gates updates: a non-finite value closes the gate, which stays closed until it is reset."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

COPY_INTERVAL = 5
"""Updates between two asynchronous copies of a device gate; each copy is awaited at the latest when the next is due, so
the host lags by at most twice as many steps."""


class FiniteGate(ABC):
    """Watches gradient norms and losses; `first_bad_step` is what the host knows so far."""

    def __init__(self) -> None:
        self.step = 0
        self.first_bad_step: int | None = None
        self.is_current = True
        """Whether the host knows all that was observed."""
        self.when_closed: list[Callable[[], None]] = []
        """Called as soon as the host knows that the gate is closed, and before it is reset."""

    def begin_step(self, step: int) -> None:
        """Set the step that the next observations belong to; `step` is >= 0 and never decreases between resets."""
        self.step = step

    @abstractmethod
    def observe_norm(self, norm: Tensor, value: float | None = None) -> float | None:
        """Close the gate if `norm`, a 0-d tensor >= 0, is not finite.

        Args:
            value: its value, if the host has read it.

        Returns:
            Its value, if the host has read it or can without waiting.
        """

    @abstractmethod
    def observe_gradients(self, gradients: list[Tensor]) -> None:
        """Close the gate if an element of `gradients` is not finite; cheaper than computing their norm.

        They must be of floating types and on the gate's device, and at least one.
        """

    @abstractmethod
    def observe_loss(self, loss: Tensor) -> None:
        """Close the gate if `loss`, a tensor of one element, is not finite.

        With several ranks, only pass values that are the same on all of them: ranks whose gates differ would drift
        apart.
        """

    @abstractmethod
    def read(self, *values: Tensor) -> list[float]:
        """The values of tensors of one element, and what `poll` tells from then on: all that was observed so far.

        The host waits for an accelerator, once; not at all without `values` if nothing was observed since the last
        `read`.
        """

    @abstractmethod
    def poll(self, force: bool = False) -> int | None:
        """The first bad step, or None while none is known; `force` waits for the device if it has to."""

    def reset(self) -> None:
        """Open the gate again."""
        self.first_bad_step = None

    def _learn(self, bad_step: int) -> None:
        self.first_bad_step = bad_step
        for listener in self.when_closed:
            listener()


def finite_gate(device: torch.device) -> FiniteGate:
    """The gate for norms that live on `device`."""
    return HostFiniteGate() if device.type == "cpu" else DeviceFiniteGate(device)


class HostFiniteGate(FiniteGate):
    """The gate for values in host memory: it closes at once, without a read through PyTorch's dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self._flag, self._one = torch.zeros(()), torch.ones(())
        self._seen = self._flag.numpy()  # the same memory

    def observe_norm(self, norm: Tensor, value: float | None = None) -> float:
        if value is None:
            value = host_value(norm)
        if not math.isfinite(value):
            self._close()
        return value

    def observe_gradients(self, gradients: list[Tensor]) -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self._flag, self._one)
        if self._seen.item():
            self._flag.zero_()
            self._close()

    def observe_loss(self, loss: Tensor) -> None:
        if loss.requires_grad:
            loss = loss.detach()
        if not math.isfinite(loss.numpy().item() if loss.dtype is torch.float32 else host_value(loss)):
            self._close()

    def _close(self) -> None:
        if self.first_bad_step is None:
            self._learn(self.step)

    def read(self, *values: Tensor) -> list[float]:
        return [host_value(value.detach().cpu()) for value in values]

    def poll(self, force: bool = False) -> int | None:
        return self.first_bad_step


def host_value(tensor: Tensor) -> float:
    """The value of a CPU tensor of one element, read through the memory that NumPy shares with it."""
    if tensor.dtype is torch.bfloat16:  # which NumPy does not support
        tensor = tensor.float()
    value: float = tensor.numpy().item()
    return value


def is_above(threshold: float | None, norm: Tensor | None, value: float | None) -> bool:
    """Whether a norm, whose value the host has read, is above a threshold in the norm's own precision."""
    if threshold is None or norm is None or value is None:
        return False
    return value > host_value(torch.tensor(threshold, dtype=norm.dtype))


class DeviceFiniteGate(FiniteGate):
    """The gate for values on an accelerator: it closes there, and asynchronous copies inform the host.

    `found_inf` (float32, 0-d) is 1 once anything was not finite, in the form that torch's fused optimizers accept.
    Observing costs three small kernels without waiting, in the order of the current stream.

    Args:
        device: the device of the values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        # One-based, so that 0 means "none" and `found_inf > bad` holds exactly while a bad step is not yet recorded.
        self._bad_step_plus_one = torch.zeros((), dtype=torch.int64, device=device)
        is_host = device.type == "cpu"  # the same logic without an accelerator, for tests
        self._landing = torch.zeros((), dtype=torch.int64, pin_memory=not is_host)
        self._landed = self._landing.numpy()
        self._device = device
        self._copied = None if is_host else torch.Event(device=device)
        self._is_copying = False
        self._updates_since_copy = 0

    def observe_norm(self, norm: Tensor, value: float | None = None) -> float | None:
        if value is None or not math.isfinite(value):
            self._raise_flag(norm)
            self._updates_since_copy += 1
        return value

    def observe_gradients(self, gradients: list[Tensor]) -> None:
        # The largest elements show it, too, and finding them only reads; the check below would also write them all.
        largest = torch._foreach_norm([one for one in gradients if one.numel()], math.inf)
        self.observe_norm(torch.stack(largest))

    def observe_loss(self, loss: Tensor) -> None:
        self._raise_flag(loss.detach())

    def _raise_flag(self, values: Tensor) -> None:
        if values.dtype is torch.bfloat16:  # which has no such kernel on CUDA (pytorch#127176)
            values = values.float()
        # One kernel that sets the flag and never clears it; the scale of 1 does not change the values.
        torch._amp_foreach_non_finite_check_and_unscale_([values], self.found_inf, self._one)
        self._bad_step_plus_one.masked_fill_(self.found_inf > self._bad_step_plus_one, self.step + 1)
        self.is_current = False

    def read(self, *values: Tensor) -> list[float]:
        if self.is_current and not values:
            return []
        parts = [value.detach().reshape(()).to(self._device) for value in (self.found_inf, *values)]
        is_closed, *known = torch.stack(parts).tolist()  # in the widest of their types
        if is_closed:
            self.poll(force=True)
        self._is_copying, self._updates_since_copy, self.is_current = False, 0, True
        return known

    def poll(self, force: bool = False) -> int | None:
        """The first bad step, or None while none is known.

        Call it once per step: it starts a copy every `COPY_INTERVAL` updates, and reads it when the next one is due,
        not earlier. What a rank knows then depends only on its steps, never on how far its device is, so all ranks
        learn of a bad step at the same step. With `force` it waits for everything queued so far (a host
        synchronization), unless `read` has.
        """
        if self.first_bad_step is None and not self.is_current:
            is_due = force or self._updates_since_copy >= COPY_INTERVAL
            if is_due and self._is_copying:
                self._finish_copy()
            if is_due and self.first_bad_step is None:
                self._start_copy()
            if force and self._is_copying:
                self._finish_copy()
                self.is_current = True
        return self.first_bad_step

    def reset(self) -> None:
        if self.when_closed:
            self.poll(force=True)
        super().reset()
        self.found_inf.zero_()
        self._bad_step_plus_one.zero_()
        self._is_copying, self.is_current = False, True
        self._updates_since_copy = 0

    def _start_copy(self) -> None:
        self._landing.copy_(self._bad_step_plus_one, non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.accelerator.current_stream(self._device))
        self._is_copying = True
        self._updates_since_copy = 0

    def _finish_copy(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        self._is_copying = False
        bad_step_plus_one = int(self._landed)
        if bad_step_plus_one:
            self._learn(bad_step_plus_one - 1)
