"""Shows the samples of a batch as text, and the fields that they have in their dataset."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from onstep.data import Batch, is_map_style
from onstep.past.samples import tokens_of

_MOST = 500
"""Characters of a field that are kept."""


def text_of(batch: Batch, tokenizer: Any) -> str | None:
    """The text of a batch of one sample, without padding; None if it has no tokens, or nothing decodes them."""
    tokens = tokens_of(batch)
    if tokens is None or not hasattr(tokenizer, "decode"):
        return None
    ids, mask = tokens[0], batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == (1, ids.size):
        ids = ids[mask[0].cpu().numpy() != 0]
    text = tokenizer.decode(ids.tolist())
    return text if isinstance(text, str) else str(text)


def fields_of_item(dataset: Any, index: int | None) -> dict[str, str]:
    """The texts and numbers of a sample as its dataset has it; tensors and lists reach the batch."""
    if index is None or dataset is None or not is_map_style(dataset):
        return {}
    item = dataset[index]
    if not isinstance(item, Mapping):
        return {}
    return {str(key): str(one)[:_MOST] for key, one in item.items() if isinstance(one, (str, int, float))}
