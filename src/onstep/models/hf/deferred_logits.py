"""Postpones the logits of a model of `transformers`, so that its loss never has all of them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_map

from onstep.config import ModelConfig
from onstep.models.fused_loss import fused_cross_entropy
from onstep.models.layers.autocast import product_dtype
from onstep.models.vocabulary_loss import LARGE_VOCABULARY, Reduction, linear_cross_entropy, tokens_of_chunk

_DESCRIBING = frozenset(
    {
        Tensor.size,
        Tensor.numel,
        Tensor.dim,
        Tensor.is_floating_point,
        Tensor.get_device,
        *(
            getattr(Tensor, name).__get__
            for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "grad_fn", "is_leaf")
        ),
    }
)
"""What can be asked without computing the logits."""


class DeferredLogits(Tensor):
    """The logits `hidden @ weight.T` of a head, which are computed when anything but their shape or type is used."""

    _hidden: Tensor
    _weight: Tensor
    _products: torch.dtype
    _is_fused: bool

    @staticmethod
    def __new__(
        cls, hidden: Tensor, weight: Tensor, dtype: torch.dtype | None = None, *, is_fused: bool = False
    ) -> DeferredLogits:
        """Logits of hidden states (..., hidden) and a head's weight (vocabulary, hidden).

        Args:
            dtype: their type; None is that of the product.
            is_fused: whether the loss is computed by one kernel (`model.fused_linear_loss`).
        """
        products = product_dtype(hidden)
        shape = (*hidden.shape[:-1], weight.shape[0])
        made: DeferredLogits = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype or products, device=hidden.device)
        made._hidden, made._weight, made._products, made._is_fused = hidden, weight, products, is_fused
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = tree_map(computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError("logits are computed before an operator sees them")

    def computed(self) -> Tensor:
        """The logits themselves."""
        with torch.autocast(self._hidden.device.type, enabled=False):
            logits = linear(self._hidden.to(self._products), self._weight.to(self._products))
        return logits.to(self.dtype)

    def in_float32(self) -> DeferredLogits:
        """The same, to be read in float32."""
        with torch.autocast(self._hidden.device.type, self._products, enabled=self._products != self._hidden.dtype):
            return DeferredLogits(self._hidden, self._weight, torch.float32, is_fused=self._is_fused)

    def cross_entropy(self, labels: Tensor, reduction: Reduction) -> Tensor:
        """The loss of labels, as many as there are rows of logits, in chunks; see `linear_cross_entropy`."""
        hidden, labels = self._hidden.flatten(0, -2), labels.flatten().to(self._hidden.device)
        if self._is_fused and reduction == "sum":
            return fused_cross_entropy(hidden.to(self._products), self._weight, labels)
        is_cast = self._products != hidden.dtype
        with torch.autocast(hidden.device.type, self._products if is_cast else None, enabled=is_cast):
            return linear_cross_entropy(hidden, self._weight, labels, reduction=reduction)


def computed(value: Any) -> Any:
    """Deferred logits as a plain tensor; anything else as it is."""
    return value.computed() if isinstance(value, DeferredLogits) else value


@contextmanager
def deferring(model: Any, config: ModelConfig) -> Iterator[None]:
    """Context in which the head of a model of `transformers` defers its logits in training, where it is worth it.

    Only for a plain linear head without a bias. What the model computes with its logits, such as a cap, computes them.
    It is worth it for as many logits as `model.chunked_loss` says, and for any with `model.fused_linear_loss`.
    """
    chunked, is_fused = config.chunked_loss, config.fused_linear_loss
    head: Any = model.get_output_embeddings() if callable(getattr(model, "get_output_embeddings", None)) else None
    is_unwanted = chunked is False or (chunked is None and getattr(head, "out_features", 0) < LARGE_VOCABULARY)
    if not _is_plain(head) or (is_unwanted and not is_fused):
        yield
        return
    own = head.forward

    def forward(hidden: Tensor) -> Tensor:
        is_large = is_fused or hidden.shape[:-1].numel() > tokens_of_chunk(head.out_features)
        if not (is_large and head.training and torch.is_grad_enabled()):
            logits: Tensor = own(hidden)
            return logits
        return DeferredLogits(hidden, head.weight, is_fused=is_fused)

    head.forward = forward
    try:
        yield
    finally:
        del head.forward


def _is_plain(head: Any) -> bool:
    """Whether a head is a linear layer without a bias, hooks or weights of a subclass of tensors."""
    return (
        type(head) is nn.Linear
        and head.bias is None
        and type(head.weight) in (nn.Parameter, Tensor)
        and not (head._forward_hooks or head._forward_pre_hooks or "forward" in vars(head))
    )
