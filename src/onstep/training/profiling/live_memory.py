"""Counts the bytes of the tensors that live during training, by what they are for, also at their peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_CASTS = frozenset({"aten::_to_copy", "aten::_conj_physical"})


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts the storages that operators of this thread create, each by its kind.

    A kind follows from when and how a storage is made: in a forward pass it is one of the activations, with the
    vocabulary as its last dimension one of the logits, the cast of a weight a 16-bit copy, and anything else temporary.
    What is stated with `assign` (weights, gradients, optimizer state) is of that kind whenever it was made.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase = "temporary"
        """The kind of what is created now; see `during`."""
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        """The bytes by kind when there were most."""
        self._vocab_size = vocab_size
        self._kinds: dict[int, tuple[str, int]] = {}

    @property
    def peak_bytes(self) -> int:
        """The most bytes that lived at once."""
        return self.peak.total()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Context in which new storages are of the kind `phase`."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def assign(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count the storages of `tensors` as `kind`, whatever they were counted as before."""
        for tensor in tensors:
            self._count(tensor.untyped_storage(), kind)
        self._note_peak()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator, and count what it has created."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._kinds:
                    self._count(storage, self._kind_of(tensor, func, args))
        self._note_peak()
        return result

    def _kind_of(self, tensor: Tensor, func: Any, args: Sequence[Any]) -> str:
        if func._schema.name in _CASTS and isinstance(args[0], nn.Parameter | Tensor):
            source = self._kinds.get(args[0].untyped_storage()._cdata)
            if source is not None and source[0].startswith("weights"):
                return "16-bit copies"
        if tensor.ndim > 1 and tensor.shape[-1] == self._vocab_size and self.phase != "optimizer":
            return "logits"
        return self.phase

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

    def _note_peak(self) -> None:
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)
