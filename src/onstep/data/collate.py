"""How samples become a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from onstep.errors import DataError


def default_data_collator(features: Sequence[Any]) -> Any:
    """A micro-batch of samples, as the collator of the same name in `transformers` makes it.

    Mappings become a dict of tensors ``(batch, ...)``, from tensors, arrays, lists and numbers; `label` and `label_ids`
    become `labels`; strings and None are left out, because no model takes them. Tensors, tuples and numbers go through
    torch's `default_collate`.

    Raises:
        DataError: where a value differs in shape between samples.
    """
    first = features[0]
    if type(first) is not dict and not isinstance(first, Mapping):
        return default_collate(list(features))
    batch: dict[str, Any] = {}
    for key, value in first.items():
        if value is None or isinstance(value, (str, bytes)):
            continue
        name = "labels" if key in ("label", "label_ids") else key
        try:
            values = list(map(itemgetter(key), features))
        except KeyError as error:
            raise _missing(key) from error
        if type(value) is not torch.Tensor and isinstance(value, Mapping):
            batch[name] = default_data_collator(values)
            continue
        try:
            if isinstance(value, torch.Tensor):
                batch[name] = torch.stack(values)
            elif isinstance(value, np.ndarray):
                batch[name] = torch.from_numpy(np.stack(values))
            else:
                batch[name] = torch.tensor(values)
        except (RuntimeError, ValueError, TypeError) as error:
            sized = [value for value in values if _is_sequence(value)]
            shapes = ", ".join(sorted({str(tuple(np.shape(value))) for value in sized})) or "numbers"
            raise DataError(
                f"samples cannot be stacked: {key!r} has {shapes} within one micro-batch ({error}); "
                "pad them, for example with collate_fn=PaddingCollator(pad_id)"
            ) from error
    return batch


class PaddingCollator:
    """A collator for samples of unequal length: pads on the right to the longest of the micro-batch.

    Pads `input_ids` with `pad_id`, `labels` with `label_pad`, `attention_mask` and `token_type_ids` with 0; adds an
    `attention_mask` where the samples have none. Everything else, and a `label` that is a number, goes through
    `default_data_collator`.
    """

    def __init__(self, pad_id: int, label_pad: int = -100) -> None:
        self._pads = {"input_ids": pad_id, "labels": label_pad, "attention_mask": 0, "token_type_ids": 0}

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The padded micro-batch, each entry ``(batch, longest)``."""
        if not isinstance(features[0], Mapping):
            raise DataError(f"PaddingCollator takes samples that are mappings, got {type(features[0]).__name__}")
        features = [_with_attention_mask(feature) for feature in features]
        padded = {key for key, value in features[0].items() if key in self._pads and _is_sequence(value)}
        rest = [{key: value for key, value in feature.items() if key not in padded} for feature in features]
        batch: dict[str, Any] = {key: self._pad(key, features) for key in features[0] if key in padded}
        batch.update(default_data_collator(rest))
        return batch

    def _pad(self, key: str, features: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        try:
            rows = [torch.as_tensor(feature[key]) for feature in features]
        except KeyError as error:
            raise _missing(key) from error
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._pads[key])


def _missing(key: str) -> DataError:
    return DataError(f"key {key!r} is missing from some samples of a micro-batch; give it to all or none")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0)


def _with_attention_mask(feature: Mapping[str, Any]) -> Mapping[str, Any]:
    if "input_ids" not in feature or "attention_mask" in feature:
        return feature
    return {**feature, "attention_mask": [1] * len(feature["input_ids"])}
