"""The random generators that a run draws from, as one state."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onstep.errors import CheckpointError

_log = logging.getLogger(__name__)

_MALFORMED = (KeyError, TypeError, ValueError, OverflowError, AttributeError, RuntimeError)
"""What the generators raise for a state that is none."""


class RngState:
    """Stateful over Python's `random`, NumPy's global generator, torch's CPU generator and that of this rank's device.

    Each rank has its own, so its component is PER_RANK.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Take the device whose generator belongs to the state; for the CPU there is none besides torch's own."""
        self._device = torch.device(device)

    def state_dict(self) -> dict[str, Any]:
        """Where each generator stands, to the bit: also the second of a pair of Gaussian draws that waits in it."""
        return {
            "python": random.getstate(),
            "numpy": np.random.get_state(legacy=False),
            "torch": torch.get_rng_state(),
            "device": {"type": self._device.type, "state": self._device_state()},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put every generator where it stood; either all of them or, on an error, none.

        A state from another type of device leaves this device's generator as it is, with a warning.

        Raises:
            CheckpointError: for a state that no generator can be put into.
        """
        try:
            python, numpy, cpu, device = (state_dict[key] for key in ("python", "numpy", "torch", "device"))
            is_same_device = device["type"] == self._device.type
            self._try_out(python, numpy, cpu, device["state"] if is_same_device else None)
        except _MALFORMED as error:
            raise CheckpointError(f"the state of the random generators cannot be loaded: {error!r}.") from error
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu.cpu())
        if is_same_device:
            self._set_device_state(device["state"])
        else:
            _log.warning(
                "The random state is of device type %s, this rank runs on %s: the device's generator goes on as it "
                "is, so what is drawn on it differs from a run that was not interrupted.",
                device["type"],
                self._device.type,
            )

    def _try_out(self, python: Any, numpy: Any, cpu: Tensor, device: Tensor | None) -> None:
        """Put the states into generators of our own, which check them; the global ones are not touched."""
        random.Random().setstate(python)
        bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # missing in NumPy's stubs
        np.random.RandomState(type(bit_generator)()).set_state(numpy)
        torch.Generator().set_state(cpu.cpu())
        if self._device.type != "cpu":
            torch.Generator(self._device).set_state(device.cpu())  # type: ignore[union-attr]

    def _device_state(self) -> Tensor | None:
        if self._device.type == "cpu":
            return None
        if self._device.type == "mps":
            return torch.mps.get_rng_state()
        state: Tensor = torch.get_device_module(self._device).get_rng_state(self._device)
        return state

    def _set_device_state(self, state: Tensor | None) -> None:
        if state is None:
            return
        if self._device.type == "mps":
            torch.mps.set_rng_state(state.cpu())
        else:
            torch.get_device_module(self._device).set_rng_state(state.cpu(), self._device)
