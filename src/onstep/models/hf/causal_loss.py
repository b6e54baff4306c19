"""Lets causal models of `transformers` compute the loss of a large vocabulary without all of its logits at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from onstep.config import ModelConfig
from onstep.models.hf.deferred_logits import DeferredLogits, deferring
from onstep.models.multi_token_prediction import IGNORE_INDEX
from onstep.models.vocabulary_loss import LARGE_VOCABULARY, logits_cross_entropy, tokens_of_chunk


@contextmanager
def causal_loss_in_chunks(module: nn.Module, config: ModelConfig) -> Iterator[None]:
    """Context in which the models of a module that use the causal loss of `transformers` compute it in chunks.

    In training, the logits of a plain linear head exist for one chunk of tokens at a time (`DeferredLogits`), unless
    something else uses them. Where a model needs its logits, for example to cap them, it computes them as before, all
    of them in its own dtype; their float32 copy, its normalization and its gradient exist for one chunk at a time. A
    loss function that the user has set stays, and so does that of a small vocabulary. `model.chunked_loss=false`
    changes nothing, and true includes small vocabularies.
    """
    models = _causal_models(module)
    wanted = (config.fused_linear_loss or config.chunked_loss) if models else False
    changed = [] if wanted is False else models
    for model in changed:
        least = 0 if wanted else LARGE_VOCABULARY
        model.loss_function = _ChunkedLoss(model.loss_function, least)
    try:
        with ExitStack() as stack:
            for model in changed:
                stack.enter_context(deferring(model, config))
            yield
    finally:
        for model in changed:
            if isinstance(vars(model).get("_loss_function"), _ChunkedLoss):
                del model._loss_function


def _causal_models(module: nn.Module) -> list[Any]:
    """The models in a module whose loss function is that of `transformers`, unchanged."""
    library = sys.modules.get("transformers.loss.loss_utils")
    own = getattr(library, "ForCausalLMLoss", None)
    found: list[Any] = [one for one in module.modules() if getattr(one, "loss_type", None) == "ForCausalLM"]
    return [] if own is None else [one for one in found if getattr(one, "loss_function", None) is own]


class _ChunkedLoss:
    """`ForCausalLMLoss` of `transformers`, with `logits_cross_entropy` for as many logits as are worth it."""

    def __init__(self, own: Callable[..., Tensor], least: int) -> None:
        self._own, self._least = own, least

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = IGNORE_INDEX,
        shift_labels: Tensor | None = None,
        **further: Any,
    ) -> Tensor:
        chunk = tokens_of_chunk(vocab_size)
        is_small = vocab_size < self._least or logits.numel() <= chunk * vocab_size
        if ignore_index != IGNORE_INDEX or (is_small and not isinstance(logits, DeferredLogits)):
            return self._own(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **further)
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = shift_labels.reshape(-1).to(logits.device)
        if isinstance(logits, DeferredLogits):
            total = logits.cross_entropy(targets, "sum")
        else:
            total = logits_cross_entropy(logits.reshape(-1, vocab_size), targets, chunk=chunk)
        if num_items_in_batch is not None:
            items = num_items_in_batch
            return total / (items.to(total.device) if isinstance(items, Tensor) else items)
        count = targets.ne(ignore_index).sum()
        # the mean over nothing is NaN with gradients of zero, as torch's
        return torch.where(count == 0, torch.nan, total / count.clamp(min=1))
