"""Reads the samples of a micro-batch from a dataset and collates them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from copy import copy
from numbers import Number
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from onstep.data.loaders.end_of_data import escaped_stop, has_items
from onstep.errors import DataError, text_of, warn_once

_LOGGER = logging.getLogger(__name__)


def default_data_collator(features: Sequence[Any]) -> Any:
    """Collate samples into a micro-batch like the collator of the same name in `transformers`.

    Mappings of tensors, arrays, lists and numbers become a dict of tensors ``(batch, ...)``; `label` and `label_ids`
    become `labels`; strings and None are dropped, because models do not accept them; a warning names the column.
    Tensors, tuples and numbers are passed to torch's `default_collate`.

    Args:
        features: the samples: mappings with tensors, arrays or numbers of the same shapes.

    Raises:
        DataError: if a value differs in shape between samples, or is missing from some of them; for a sample that is
            None, or of a type that cannot be collated.
    """
    first = features[0]
    if type(first) is not dict and not isinstance(first, Mapping):
        try:
            return default_collate(list(features))
        except (TypeError, RuntimeError) as error:
            if any(feature is None for feature in features):
                raise _none() from error
            raise DataError(
                f"samples of type {type(first).__name__} cannot be collated: {error}; return mappings or tuples of "
                "numbers, arrays or tensors of one shape, or give a collate_fn"
            ) from error
    try:
        num_values = sum(map(len, features))
    except TypeError as error:
        raise _none() from error
    if num_values != len(first) * len(features):  # a key that the first sample lacks would be lost
        raise _missing(next(key for one in features for key in one if not all(key in each for each in features)))
    batch: dict[str, Any] = {}
    for key, value in first.items():
        if value is None or isinstance(value, (str, bytes)):
            if value is None and any(feature.get(key) is not None for feature in features):
                raise DataError(f"key {key!r} is None in some samples of a micro-batch; give it a value in all or none")
            what = "strings" if value is not None else "only None"
            warn_once(_LOGGER, f"{key!r} of the samples holds {what}, which the default collator drops")
            continue
        name = "labels" if key in ("label", "label_ids") else key
        if name in batch:
            raise DataError(f"{key!r} and another key both become 'labels'; remove one of them from the samples")
        try:
            values = list(map(itemgetter(key), features))
        except KeyError as error:
            raise _missing(key) from error
        if len(values) != len(features):  # `map` ends with a StopIteration of a sample
            raise escaped_stop()
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
            kind = next(filter(None, map(_unconvertible, values)), None)
            if kind is not None:
                raise DataError(
                    f"samples cannot be stacked: {key!r} has {kind}, of which no tensor can be made ({error}); convert "
                    f"them to numbers or tensors in the dataset, or in a collator of your own"
                ) from error
            sized = [value for value in values if _is_sequence(value)]
            shapes = ", ".join(sorted(set(map(_shape_of, sized)))) or "numbers"
            raise DataError(
                f"samples cannot be stacked: {key!r} has {shapes} within one micro-batch ({error}); "
                "pad them, for example with collate_fn=PaddingCollator(pad_id)"
            ) from error
    return batch


class PaddingCollator:
    """A collator for samples of unequal length: pads on the right to the longest in the micro-batch.

    Pads `input_ids` with `pad_id`, `labels` with `label_pad`, `attention_mask` and `token_type_ids` with 0; adds an
    `attention_mask` if the samples have none. Everything else, including a numeric `label`, is passed to
    `default_data_collator`.

    Args:
        pad_id: the token that pads `input_ids`.
        label_pad: the label of padding, which has no loss.
    """

    def __init__(self, pad_id: int, label_pad: int = -100) -> None:
        self._pads = {"input_ids": pad_id, "labels": label_pad, "attention_mask": 0, "token_type_ids": 0}

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The padded micro-batch, each entry ``(batch, longest)``."""
        if not isinstance(features[0], Mapping):
            raise DataError(f"PaddingCollator requires samples that are mappings, got {type(features[0]).__name__}")
        features = [_with_attention_mask(feature) for feature in features]
        padded = {key for key, value in features[0].items() if key in self._pads and _is_sequence(value)}
        rest = [{key: value for key, value in feature.items() if key not in padded} for feature in features]
        batch: dict[str, Any] = {}
        for key in [key for key in features[0] if key in padded]:
            try:
                rows = [torch.as_tensor(feature[key]) for feature in features]
            except KeyError as error:
                raise _missing(key) from error
            batch[key] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self._pads[key])
        batch.update(default_data_collator(rest))
        return batch


def _none(where: str = "") -> DataError:
    return DataError(
        f"a sample is None{where}; the dataset must return each sample (is there a `return` in every case of "
        f"__getitem__?)"
    )


def name_sample(dataset: Any, index: int, error: Exception) -> None:
    """Add a note with the sample to an error of `dataset[index]`.

    Raises:
        DataError: if it comes from a lookup by other keys than 0, 1, ...
    """
    error.add_note(_place(dataset, index))
    if isinstance(error, KeyError) and error.args == (index,):
        raise DataError(
            f"the {type(dataset).__name__} has no sample {index}; a dataset must have those from 0 to its length - 1: "
            f"pass a list (list(samples.values()) for a dict, frame.to_dict('records') for a DataFrame)"
        ) from error


def _place(dataset: Any, index: int) -> str:
    length = length_of(dataset)
    of = "" if length is None else f", whose length is {length:,}"
    return f"raised by the sample at index {index} of the {type(dataset).__name__}{of}"


def _unconvertible(value: Any) -> str | None:
    """What a value is that no tensor can be made of; None if one can."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    if isinstance(value, np.ndarray):
        return None if value.dtype.kind in "biufc" else f"arrays of dtype {value.dtype}"
    if isinstance(value, (torch.Tensor, Number, np.generic, list, tuple)):
        return None
    return f"values of type {type(value).__name__}"


def _shape_of(value: Any) -> str:
    try:
        return str(tuple(np.shape(value)))
    except ValueError:
        return "nested lists of unequal length"


def _missing(key: str) -> DataError:
    return DataError(f"key {key!r} is missing from some samples of a micro-batch; provide it for all or none")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0)


def _with_attention_mask(feature: Mapping[str, Any]) -> Mapping[str, Any]:
    if "input_ids" not in feature or "attention_mask" in feature:
        return feature
    return {**feature, "attention_mask": [1] * len(feature["input_ids"])}


Collate = Callable[[list[Any]], Any]
Fetch = Callable[[list[int]], Any]


def is_map_style(dataset: Any) -> bool:
    """Whether samples are read by index (`__getitem__` and `__len__`) rather than by iteration.

    Args:
        dataset: any dataset.
    """
    if isinstance(dataset, (IterableDataset, DataLoader)):
        return False
    return has_items(dataset) and hasattr(dataset, "__len__")


def length_of(dataset: Any) -> int | None:
    """``len(dataset)``, or None if it has no length.

    Raises:
        DataError: if its `__len__` returns something else than a number of samples.
    """
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, ValueError, OverflowError) as error:
        if any(text in text_of(error) for text in _NOT_A_LENGTH):
            raise DataError(
                f"__len__ of the {type(dataset).__name__} must return its number of samples, an int >= 0: {error}"
            ) from error
        if isinstance(error, (TypeError, NotImplementedError)):
            return None
        raise


_NOT_A_LENGTH = "cannot be interpreted as an integer", "should return >= 0", "index-sized integer"
"""What Python says of the result of a `__len__`."""


def samples_in(source: Any, already_batched: bool) -> int | None:
    """Number of samples of a dataset, or of the dataset behind a loader of ready-made batches; None if unknown."""
    return length_of(getattr(source, "dataset", None) if already_batched else source)


def fetch_function(dataset: Any, collate_fn: Collate | None) -> Fetch:
    """The fastest way that `dataset` offers to read a micro-batch by a list of indices.

    That is its `get_batch(ids)` if no collator is given, else `__getitems__(ids)`, else one sample at a time.
    """
    if collate_fn is None and hasattr(dataset, "get_batch"):
        get_batch: Fetch = dataset.get_batch
        return get_batch
    collate = collate_fn or default_data_collator
    read_samples = getattr(dataset, "__getitems__", None)

    def read(ids: list[int]) -> Any:
        if read_samples is None:
            samples = []
            for index in ids:  # not `map`, which would end with a StopIteration of the dataset
                try:
                    samples.append(dataset[index])
                except Exception as error:
                    name_sample(dataset, index, error)
                    raise
        else:
            samples = read_samples(ids)
            if isinstance(samples, list) and len(samples) != len(ids):
                raise DataError(
                    f"__getitems__ of {type(dataset).__name__} returned {len(samples)} of {len(ids)} samples"
                )
        try:
            return collate(samples)
        except Exception as error:
            missing = [index for index, sample in zip(ids, samples, strict=False) if sample is None]
            if missing:
                raise _none(f", at index {missing[0]} of the {type(dataset).__name__}") from error
            raise

    return read


def should_pin(pin_memory: bool) -> bool:
    """Whether pinning host memory is requested and useful here."""
    return pin_memory and torch.cuda.is_available()


def pin(batch: Any) -> Any:
    """`batch` with its tensors in pinned memory, which allows asynchronous copies to a GPU."""
    if isinstance(batch, torch.Tensor) or hasattr(batch, "pin_memory"):
        return batch.pin_memory()
    if isinstance(batch, Mapping):
        return mapping_like(batch, {key: pin(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[pin(one) for one in batch])
    if isinstance(batch, (list, tuple)):
        return type(batch)([pin(one) for one in batch])
    return batch


def mapping_like(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """`values`, which has the keys of `batch`, as a mapping of the same type."""
    if type(batch) is dict:
        return values
    if isinstance(batch, MutableMapping):
        clone = copy(batch)
        clone.update(values)
        return clone
    return type(batch)(values)  # type: ignore[call-arg]


def as_it_is(batch: Any) -> Any:
    """Identity collator for a DataLoader whose dataset returns whole micro-batches."""
    return batch
