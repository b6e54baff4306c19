"""Records the tokenizer of a Trainer's language model in `run.json`, as `onstep train` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from onstep.data import Batch
from onstep.data.corpus.tokenizers import library_fingerprint
from onstep.training.compute.losses import IGNORE_INDEX
from onstep.training.run import Run
from onstep.training.runs.fingerprints import is_arrow_dataset
from onstep.training.setup.tokenizer_record import bytes_of, write_tokenizer

_ROWS = 16
"""Number of rows, spread over the data, whose text is counted."""
_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
"""Endings of the names of classes whose loss is per token, whatever their data."""


def record_tokenizer(run: Run, model: nn.Module, collator: object, *datasets: object) -> None:
    """Write the fingerprint of a Trainer's tokenizer and the bytes of text of its tokens to `run.json`.

    Only rows of a list or a `datasets.Dataset` are read, because reading a user's dataset may have effects. Nothing is
    written for other models than language models, as a classifier, whose loss is not per token.

    Args:
        datasets: the validation data first; None where there is none.
    """
    tokenizer = getattr(run.processing_class, "tokenizer", run.processing_class)
    if run.run_dir is None or not run.world.is_main or not hasattr(tokenizer, "get_vocab"):
        return
    ratios = [_bytes_per_token(one, getattr(tokenizer, "decode", None), collator) for one in datasets]
    ratio = next((one for one in ratios if one is not None), None)
    if ratio is not None or type(model).__name__.endswith(_LANGUAGE_MODELS):
        write_tokenizer(run.run_dir, library_fingerprint(tokenizer), ratio)


def _bytes_per_token(dataset: Any, decode: Callable[..., str] | None, collator: object) -> float | None:
    """The UTF-8 bytes of text per token that is predicted; None if rows are not those of a causal model."""
    is_plain = is_arrow_dataset(dataset) and dataset.format["type"] != "custom"
    if decode is None or not (is_plain or isinstance(dataset, (list, tuple))):
        return None
    count = min(_ROWS, len(dataset))
    shifts = getattr(collator, "mlm", None) is False
    rows = [_predicted(dataset[number * len(dataset) // count], shifts) for number in range(count)]
    found = [ids for ids in rows if ids is not None]
    if len(found) < count or not any(found):
        return None
    texts = [decode(ids, skip_special_tokens=True) for ids in found]
    return bytes_of(texts) / sum(map(len, found))


def _predicted(row: Batch, copies_inputs: bool) -> list[int] | None:
    """The tokens of a row that count in the loss; None if the labels are not the inputs.

    Args:
        copies_inputs: the collator makes labels of the inputs.
    """
    if not isinstance(row, Mapping):
        return None
    ids = _numbers(row.get("input_ids"))
    labels = ids if copies_inputs and "labels" not in row else _numbers(row.get("labels"))
    if ids is None or labels is None or len(ids) != len(labels):
        return None
    pairs = [(one, label) for one, label in zip(ids, labels, strict=True) if label != IGNORE_INDEX]
    return [one for one, _ in pairs] if all(one == label and one >= 0 for one, label in pairs) else None


def _numbers(values: object) -> list[int] | None:
    """Integers of a list, an array or a tensor of one dimension; None for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    return values if isinstance(values, list) and all(type(one) is int for one in values) else None
