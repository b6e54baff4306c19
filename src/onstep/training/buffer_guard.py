"""Keeps a copy of a model's buffers, which a forward pass changes before anybody knows whether the step is good."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BufferGuard:
    """Puts buffers such as the running statistics of a batch norm back to where a step began.

    Only buffers that are saved with the model count, unless `saved_only` is False. A model without any costs nothing.
    """

    def __init__(self, model: list[nn.Module], *, saved_only: bool = True) -> None:
        self._places = {
            id(buffer): (module, name)
            for chunk in model
            for module in chunk.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and not (saved_only and name in module._non_persistent_buffers_set)
        }
        self._copies: list[Tensor] = []

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the buffers as they are now."""
        if not self._copies:
            self._copies = [buffer.clone() for buffer in self._buffers()]
            return
        for copy, buffer in zip(self._copies, self._buffers(), strict=True):
            copy.copy_(buffer)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the buffers back to what `keep` saw."""
        for copy, buffer in zip(self._copies, self._buffers(), strict=False):
            buffer.copy_(copy)

    def _buffers(self) -> list[Tensor]:
        """The buffers of today: a forward pass may put another tensor in the place of one."""
        return [getattr(module, name) for module, name in self._places.values()]
