"""Parameters in MXFP8 that are gathered through the buffer of the gradients, in one process.

As in Megatron-Core: main parameters (float32) are copied into the buffer, gathered there and quantized into the
parameters. Then the buffer is cleared for the gradients, which the backward pass adds up in it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from onstep.distributed.mxfp8 import rounded
from tests.support.small_runs import TinyModel


class SharedBufferChunk(nn.Module):
    """A chunk with Megatron-Core's methods, whose gradients share memory with what is gathered.

    Args:
        shares: False for the same numbers without any sharing: parameters follow each update at once.
    """

    def __init__(self, *, shares: bool = True) -> None:
        super().__init__()
        self.module = TinyModel()
        self.ddp_config = SimpleNamespace(
            use_distributed_optimizer=True, overlap_param_gather=shares, reuse_grad_buf_for_mxfp8_param_ag=shares
        )
        self.shares = shares
        self.main = {name: one.detach().clone() for name, one in self.module.named_parameters()}
        self.buffer = {name: torch.zeros_like(one) for name, one in self.main.items()}
        self.dispatched: set[str] = set()
        """Parameters that were gathered since the main ones were copied."""
        self.remove_forward_pre_hook_handles: dict[nn.Module, Any] = {}
        self.take_main()
        if shares:
            self.enable_forward_pre_hook()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def zero_grad_buffer(self) -> None:
        for name, one in self.module.named_parameters():
            self.buffer[name].zero_()
            one.grad = self.buffer[name]

    def enable_forward_pre_hook(self) -> None:
        assert not self.remove_forward_pre_hook_handles
        for name, module in self.module.named_modules():
            own = [f"{name}.{one}" for one, _ in module.named_parameters(recurse=False)]
            if own:
                hook = module.register_forward_pre_hook(lambda _, __, own=own: self._gather(own))
                self.remove_forward_pre_hook_handles[module] = hook

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        assert self.remove_forward_pre_hook_handles
        for hook in self.remove_forward_pre_hook_handles.values():
            hook.remove()
        self.remove_forward_pre_hook_handles.clear()
        if param_sync:
            self.dispatched.clear()
            self._gather(list(self.main))

    def copy_main(self) -> None:
        """Stage the main parameters in the buffer; their gathers are due again."""
        for name, value in self.main.items():
            self.buffer[name].add_(value)  # as if gradients were there: a buffer that is not cleared shows
        self.dispatched.clear()

    def take_main(self) -> None:
        """Quantize the main parameters."""
        for name, value in self.main.items():
            self.module.get_parameter(name).data.copy_(rounded(value))

    def _gather(self, names: list[str]) -> None:
        for name in names:
            if name not in self.dispatched:
                self.dispatched.add(name)
                self.module.get_parameter(name).data.copy_(rounded(self.buffer[name]))
                self.buffer[name].zero_()


class SharedBufferOptimizer:
    """Plain gradient descent on the main parameters, with the methods that the loop calls."""

    def __init__(self, chunk: SharedBufferChunk, lr: float = 0.05) -> None:
        self._chunk, self._lr = chunk, lr
        self.param_groups: list[dict[str, Any]] = [{"lr": lr, "params": list(chunk.parameters())}]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The gradients are in the chunk's buffer."""

    def step(self) -> tuple[bool, float, int]:
        chunk, square = self._chunk, torch.zeros(())
        for name, value in chunk.main.items():
            gradient = chunk.buffer[name] / 20
            square += gradient.square().sum()
            value.sub_(self._lr * gradient)
        if not chunk.shares:
            chunk.take_main()
        return True, float(square.sqrt()), 0

    def _copy_main_params_to_param_buffer(self) -> None:
        self._chunk.copy_main()

    def prepare_model_params_for_param_sync(self) -> None:
        for gradient in self._chunk.buffer.values():
            gradient.zero_()
        self._chunk.copy_main()

    def state_dict(self) -> dict[str, Any]:
        return {"main": {name: one.clone() for name, one in self._chunk.main.items()}}

    def load_state_dict(self, state_dict: dict[str, dict[str, Tensor]]) -> None:
        for name, value in state_dict["main"].items():
            self._chunk.main[name].copy_(value)
