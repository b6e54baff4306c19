"""Counts the bytes that autograd keeps for backward passes, by hooks of saved tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """The storages that are saved inside, each once, without those of weights and buffers.

    Args:
        apart: the tensors that do not count.
    """

    def __init__(self, apart: Iterable[Tensor]) -> None:
        self.now = self.peak = 0
        self._apart = {one.untyped_storage().data_ptr() for one in apart}
        self._times: Counter[int] = Counter()
        super().__init__(lambda one: _Saved(one, self), lambda saved: saved.tensor)

    def __enter__(self) -> SavedBytes:  # type: ignore[override]
        """Begin to count."""
        super().__enter__()
        return self

    def add(self, tensor: Tensor, times: int) -> None:
        """Count a tensor that is saved once more, or once less."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key in self._apart:
            return
        before = self._times[key]
        self._times[key] += times
        if (before > 0) != (self._times[key] > 0):
            self.now += storage.nbytes() * times
            self.peak = max(self.peak, self.now)


class _Saved:
    def __init__(self, tensor: Tensor, counted: SavedBytes) -> None:
        self.tensor, self._counted = tensor.detach(), counted
        counted.add(tensor, 1)

    def __del__(self, *_: Any) -> None:
        self._counted.add(self.tensor, -1)
