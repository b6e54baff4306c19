"""Computes the loss from hidden states and the output embeddings of a model, without its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import ref

from torch import Tensor, nn

from onstep.data import Batch
from onstep.errors import ConfigError
from onstep.trainer.loss_convention import MAPPING, NUM_ITEMS, accepts_num_items, inner_module

Loss = Callable[..., Tensor]
_ASKS = "return_hidden_states"
"""The keyword with which Forgather's models return hidden states in place of logits."""


class FusedLoss:
    """The loss of `fused_loss_factory(output_embeddings)(hidden_states, labels)`.

    The hidden states (batch, seq, hidden) are the input of the output embeddings, whose own forward is skipped: no
    logits exist. A model whose `forward` has `return_hidden_states` is asked for them. What the model does to its
    logits, such as a soft cap, is left to the loss.
    """

    def __init__(self, factory: Callable[[nn.Module], Loss]) -> None:
        self._factory = factory
        self._made: tuple[ref[nn.Module], Loss] | None = None

    def function(self, model: nn.Module) -> Loss:
        """The loss function for the output embeddings of a model.

        Raises:
            ConfigError: for a model without output embeddings, or a factory that returns no function.
        """
        head = _head(model)
        if self._made is None or self._made[0]() is not head:
            made = self._factory(head)
            if not callable(made):
                raise ConfigError(
                    f"fused_loss_factory must return a function of (hidden_states, labels), got {made!r}; pass a class "
                    f"or partial that is called with the output embeddings"
                )
            self._made = ref(head), made
        return self._made[1]

    def __call__(
        self, model: nn.Module, inputs: Batch, num_items: Tensor | int | None, *, returns_logits: bool
    ) -> tuple[Tensor, object]:
        """The loss of a micro-batch, and the model's outputs, which have logits with `returns_logits`."""
        function = self.function(model)
        if not isinstance(inputs, MAPPING) or "labels" not in inputs:
            raise ConfigError("fused_loss_factory requires batches with `labels`; pass a data_collator that adds them.")
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        hidden, outputs = _hidden_states(model, inputs, returns_logits=returns_logits)
        further = {NUM_ITEMS: num_items} if accepts_num_items(function) else {}
        return function(hidden, labels, **further), outputs


def _head(model: nn.Module) -> nn.Module:
    inner = inner_module(model)
    get = getattr(inner, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if not isinstance(head, nn.Module):
        raise ConfigError(
            f"fused_loss_factory requires a model whose get_output_embeddings() returns the module that computes the "
            f"logits, which {type(inner).__name__} has not; add that method, or use compute_loss_func."
        )
    return head


def _hidden_states(model: nn.Module, inputs: dict[str, object], *, returns_logits: bool) -> tuple[Tensor, object]:
    inner = inner_module(model)
    if not returns_logits and _ASKS in inspect.signature(inner.forward).parameters:
        found = model(**inputs, **{_ASKS: True})
        if isinstance(found, Tensor):
            return found, found
    with _captured(_head(model), computes=returns_logits) as captured:
        outputs = model(**inputs)
    if len(captured) != 1:
        raise ConfigError(
            f"fused_loss_factory requires a model that calls its output embeddings once, and {type(inner).__name__} "
            f"calls them {len(captured)} times; use compute_loss_func."
        )
    return captured[0], outputs


@contextmanager
def _captured(head: nn.Module, *, computes: bool) -> Iterator[list[Tensor]]:
    """The inputs of the output embeddings, which return them unchanged unless they are to compute."""
    captured: list[Tensor] = []
    own = head.forward

    def forward(hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        captured.append(hidden)
        return own(hidden, *args, **kwargs) if computes else hidden

    before = vars(head).get("forward")
    head.forward = forward
    try:
        yield captured
    finally:
        if before is None:
            del head.forward
        else:
            head.forward = before
