"""A distributed optimizer with overlapped gathers in one process: after an update, some parameters are old for a while.

The second half of each parameter is "of another rank": it has its old values, or zeros, until somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from onstep.optim import TrainingOptimizer
from tests.support.small_runs import TinyModel


class DelayedChunk(nn.Module):
    """A chunk whose forward pre-hooks wait for the gathers of their own module's parameters.

    Args:
        overlap: False for the same chunk without any delay.
        fill: what a parameter has until it is gathered: "old" or "zero" values.
        waits: has `finish_param_sync`, as Onstep's chunks have; Megatron's have not.
    """

    def __init__(self, *, overlap: bool = True, fill: str = "old", waits: bool = True) -> None:
        super().__init__()
        self.module = TinyModel()
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=overlap)
        self.overlap, self.fill = overlap, fill
        self.in_flight: dict[str, Tensor] = {}
        self.remove_forward_pre_hook_handles: dict[nn.Module, Any] = {}
        self._readers: list[Any] = []
        self.log: list[str] = []
        self.num_waited_for = 0
        """Parameters that a forward pass had to wait for."""
        if waits:
            self.finish_param_sync: Callable[[], None] = self._finish_all
        if overlap:
            self.enable_forward_pre_hook()
            self.log.clear()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        for name, module in self.module.named_modules():
            own = [f"{name}.{one}".removeprefix(".") for one, _ in module.named_parameters(recurse=False)]
            if own:
                hook = module.register_forward_pre_hook(lambda _, __, own=own: self._finish_own(own))
                self.remove_forward_pre_hook_handles[module] = hook
        for module in self.modules() if hasattr(self, "finish_param_sync") else ():
            self._readers.append(module.register_state_dict_pre_hook(lambda *_: self._finish_all()))
        self.log.append("on")

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        assert self.remove_forward_pre_hook_handles
        for hook in (*self.remove_forward_pre_hook_handles.values(), *self._readers):
            hook.remove()
        self.remove_forward_pre_hook_handles.clear()
        self._readers.clear()
        self.log.append("off, gathered" if param_sync else "off")
        if param_sync:
            self._finish_all()

    def delay(self, before: dict[str, Tensor]) -> None:
        """Let the update just made arrive later."""
        if not self.overlap:
            return
        for name, parameter in self.module.named_parameters():
            self.in_flight[name] = parameter.detach().clone()
            flat, half = parameter.data.view(-1), parameter.numel() // 2
            flat[half:] = before[name].view(-1)[half:] if self.fill == "old" else 0

    def _finish(self, names: list[str]) -> None:
        for name in names:
            value = self.in_flight.pop(name, None)
            if value is not None:
                self.module.get_parameter(name).data.copy_(value)

    def _finish_own(self, names: list[str]) -> None:
        self.num_waited_for += sum(name in self.in_flight for name in names)
        self._finish(names)

    def _finish_all(self) -> None:
        self._finish(list(self.in_flight))


class DelayedOptimizer(TrainingOptimizer):
    """SGD with momentum whose updates arrive later."""

    def __init__(self, chunk: DelayedChunk) -> None:
        super().__init__(torch.optim.SGD(chunk.parameters(), lr=0.1, momentum=0.9))
        self._chunk = chunk

    def apply(self) -> bool:
        assert not self._chunk.in_flight, "an update of parameters that are not gathered"
        before = {name: one.detach().clone() for name, one in self._chunk.module.named_parameters()}
        applied = super().apply()
        if applied:
            self._chunk.delay(before)
        return applied
