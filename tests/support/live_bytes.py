"""Counts the bytes of the tensors that operators create, while they are alive: a peak of memory on any device."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The storages that are made inside, autograd's included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.largest = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {self._key(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and self._key(one) not in given | self._known:
                self._add(one)
        return result

    @staticmethod
    def _key(tensor: Tensor) -> int:
        return tensor.untyped_storage()._cdata

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), self._key(tensor)
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
