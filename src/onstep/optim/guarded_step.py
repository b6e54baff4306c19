"""Runs an optimizer's step so that a raised flag on the device leaves weights and state as they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onstep.distributed.shards import is_sharded, local_part
from onstep.optim.fused_step import FusedStep, newcomers, without_gradients

GUARDED = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.Muon,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
"""Torch's optimizers that update each parameter from its own gradient and state alone, without reading the device."""

PART_BYTES = 2**28
"""Weights and state that are copied at once."""

_REMEMBERED_STEPS = 16
"""The host learns of a raised flag at most 10 steps late."""


class GuardedStep:
    """Does the same as `optimizer.step()`, unless a flag on the device is raised; the host does not wait for the flag.

    Weights and state are copied before the step, and where the flag is raised the copies are written back: two more
    passes over them, in parts, so that the copies take little memory. Counters that torch keeps on the host are
    restored by `restore_counters`, once the host knows.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._step = FusedStep(optimizer)
        self._counters: deque[_Counters] = deque(maxlen=_REMEMBERED_STEPS)

    @staticmethod
    def supports(optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is an optimizer of torch that can be guarded."""
        return type(optimizer) in GUARDED and not any(group.get("differentiable") for group in optimizer.param_groups)

    def is_possible(self) -> bool:
        """Whether the next step can be guarded: it creates no state, and runs nothing but torch's code."""
        if isinstance(self._optimizer, torch.optim.Muon) and is_sharded(
            param for group in self._optimizer.param_groups for param in group["params"]
        ):
            return False  # whose ranks exchange rows
        return self._step.runs_only_torchs_code() and not newcomers(self._optimizer)

    @torch.no_grad()
    def __call__(self, found_inf: Tensor) -> None:
        """Update the parameters that have a gradient, unless `found_inf`, 0-d on their device, is 1."""
        params = [
            param for group in self._optimizer.param_groups for param in group["params"] if param.grad is not None
        ]
        self._keep_counters(found_inf, params)
        is_closed, parts = found_inf.bool(), list(self._parts(params))
        if len(parts) < 2:
            self._update(is_closed, params)
            return
        for part in parts:
            with without_gradients([*params[: part.start], *params[part.stop :]]):
                self._update(is_closed, params[part])

    def restore_counters(self) -> None:
        """Set the counters on the host back to before the first step that the flag has undone. Reads the device."""
        flags = torch.stack([one.found_inf for one in self._counters]).tolist() if self._counters else []
        undone = next((one for one, flag in zip(self._counters, flags, strict=True) if flag), None)
        if undone is not None:
            torch._foreach_copy_(undone.counters, list(undone.values.unbind()))
        self._counters.clear()

    def _update(self, is_closed: Tensor, params: list[Tensor]) -> None:
        tensors = [one for param in params for one in self._on_device(param)]
        kept = [torch.empty_like(one) for one in tensors]
        if tensors:
            torch._foreach_copy_(kept, tensors)
        self._step()
        for before, after in zip(kept, tensors, strict=True):
            torch.where(is_closed, before, after, out=after)

    def _parts(self, params: list[Tensor]) -> Iterator[slice]:
        """Ranges of parameters of about `PART_BYTES`."""
        start = num_bytes = 0
        for end, param in enumerate(params):
            added = sum(one.numel() * one.element_size() for one in self._on_device(param))
            if num_bytes and num_bytes + added > PART_BYTES:
                yield slice(start, end)
                start, num_bytes = end, 0
            num_bytes += added
        yield slice(start, len(params))

    def _on_device(self, param: Tensor) -> Iterator[Tensor]:
        """What a step changes of a parameter on the device."""
        yield local_part(param).detach()
        for value in self._optimizer.state.get(param, {}).values():
            if isinstance(value, Tensor) and not _is_counter(value):
                yield local_part(value)

    def _keep_counters(self, found_inf: Tensor, params: list[Tensor]) -> None:
        state = self._optimizer.state
        values = [value for param in params for value in state.get(param, {}).values() if isinstance(value, Tensor)]
        counters = list(filter(_is_counter, values))
        if counters:
            self._counters.append(_Counters(found_inf.clone(), counters, torch.stack(counters)))


class _Counters(NamedTuple):
    """What torch counts on the host, as it was before a step."""

    found_inf: Tensor
    """The flag of the step, on the device."""
    counters: list[Tensor]
    values: Tensor


def _is_counter(value: Tensor) -> bool:
    return value.ndim == 0 and value.device.type == "cpu"
