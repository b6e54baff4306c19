"""Counts the bytes of the tensors that live during training, by what they are for, also at their peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPIES, ACTIVATIONS, LOGITS, TEMPORARY = "16-bit copies", "activations", "logits and loss", "temporary"
OF_WEIGHTS = ("weights, trained", "weights, frozen")


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts the storages that operators create, each by its kind.

    A kind follows from how a storage is made: with the vocabulary as its last dimension it is one of the logits, the
    cast of a weight is a 16-bit copy, what a forward pass makes is one of the activations, and anything else temporary.
    What is stated with `assign` (weights, gradients, optimizer state) is of that kind whenever it was made.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_forward = False
        """Whether a forward pass is under way; a backward pass is noticed."""
        self.live: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        """The most bytes of each kind."""
        self.peak: Counter[str] = Counter()
        """The bytes by kind when there were most in all."""
        self.kept: Counter[str] = Counter()
        """The bytes by kind when the last backward pass began."""
        self._was_forward = False
        self._vocab_size = vocab_size
        self._kinds: dict[int, tuple[str, int]] = {}

    def assign(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` as `kind`, whatever they were counted as before."""
        for tensor in tensors:
            self._count(tensor.untyped_storage(), kind)
        self._note()

    def kind(self, tensor: Tensor) -> str | None:
        """What the storage of a tensor is counted as; None if it is not."""
        return self._kinds.get(tensor.untyped_storage()._cdata, (None, 0))[0]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and count what it has created."""
        is_backward = torch._C._current_graph_task_id() != -1
        if is_backward and self._was_forward:
            self.kept = Counter(self.live)
        self._was_forward = not is_backward and self.is_forward
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._kinds:
                    self._count(storage, self._kind_of(tensor, func, args))
        self._note()
        return result

    def _kind_of(self, tensor: Tensor, func: Any, args: Sequence[Any]) -> str:
        if func is torch.ops.aten._to_copy.default and self.kind(args[0]) in OF_WEIGHTS:
            return COPIES
        if tensor.ndim > 1 and tensor.shape[-1] == self._vocab_size:
            return LOGITS
        return ACTIVATIONS if self._was_forward else TEMPORARY

    def _count(self, storage: UntypedStorage, kind: str) -> None:
        key = storage._cdata
        if key in self._kinds:
            before, size = self._kinds[key]
            self.live[before] -= size
        else:
            size = storage.nbytes()
            weakref.finalize(storage, self._forget, key)
        self._kinds[key] = kind, size
        self.live[kind] += size

    def _forget(self, key: int) -> None:
        kind, size = self._kinds.pop(key)
        self.live[kind] -= size

    def _note(self) -> None:
        self.most |= self.live
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)
