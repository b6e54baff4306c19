"""Keeps a copy of a model's buffers, which a forward pass changes before anybody knows whether the step is good."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferGuard:
    """Puts buffers such as the running statistics of a batch norm back to where a step began.

    Only buffers that are saved with the model count. A model without any costs nothing.
    """

    def __init__(self, model: list[nn.Module]) -> None:
        self._buffers = list(dict.fromkeys(buffer for chunk in model for buffer in _saved_buffers(chunk)))
        self._copies: list[Tensor] = []

    def keep(self) -> None:
        """Copy the buffers as they are now."""
        if not self._copies:
            self._copies = [buffer.detach().clone() for buffer in self._buffers]
            return
        for copy, buffer in zip(self._copies, self._buffers, strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back to what `keep` saw."""
        for copy, buffer in zip(self._copies, self._buffers, strict=False):
            buffer.copy_(copy)


def _saved_buffers(model: nn.Module) -> list[Tensor]:
    return [
        buffer
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]
