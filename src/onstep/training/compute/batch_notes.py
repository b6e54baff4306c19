"""Describes the micro-batch at which a user's code failed, and explains what in it the code cannot take."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor, nn

from onstep.errors import text_of

_MAX_ENTRIES, _MAX_NAME = 8, 40

SECOND_BACKWARD = (
    "the training loop runs the backward pass of the returned loss itself: remove .backward() from the forward step, "
    "compute_loss or the model, and keep no tensor with a graph from one micro-batch to the next, only .detach() of it"
)
"""What helps against a second backward pass through the same graph."""

_CLASS_IDS = (
    "cross entropy requires one class id for each sample or token: labels (batch,) for logits (batch, classes). "
    "Convert one-hot labels with .argmax(-1), and drop a last dimension of 1 with .squeeze(-1)"
)
_HINTS = {
    "leaf Variable": "the forward pass changes a weight in place: do that under torch.no_grad(), or on a copy",
    "backward through the graph a second time": SECOND_BACKWARD,
    "can't be cast to the desired output type": (
        "a loss such as binary cross entropy requires floating-point targets: convert them with .float()"
    ),
    "Target size": (
        "for class ids, convert the labels with .long(), one id for each sample; for several labels per sample, they "
        "must be floating-point of shape (batch, classes), as the logits are"
    ),
    "to match target batch_size": _CLASS_IDS,
    "target with class probabilities": _CLASS_IDS,
    "multi-target not supported": _CLASS_IDS,
    "must be Tensor, not": "the model requires tensors: does the collator return them, by the names of its parameters?",
    "more than 1 value per channel": "batch normalization requires more than one sample in each micro-batch",
    "'MicroBatches' object": "data_iterator is an iterator: read the micro-batch by next(data_iterator)",
    "object is not an iterator": "a forward step is called with (data_iterator, model), in this order",
    "0 positional arguments but 1 was given": (
        "a loss function is called with the output that the forward step returns beside it: lambda output: ..."
    ),
    "uninitialized parameter": (
        "lazy layers have no weights yet: pass one batch through the model before the training, under torch.no_grad()"
    ),
}


def note_of(error: Exception, batch: object, step: int, is_training: bool) -> str:
    """Where a forward step failed, on what, and what helps if that is known."""
    where = f"in step {step + 1}" if is_training else f"in an evaluation after step {step}"
    text = text_of(error)
    hint = next((hint for part, hint in _HINTS.items() if part in text), None)
    if hint is None and ("shape" in text or "size" in text):
        hint = "the shapes and the sizes of the model's layers must fit"
    shown = "" if batch is None else f", on the micro-batch {contents(batch)}"
    return f"raised {where}{shown}" + (f"; {hint}" if hint else "")


def contents(batch: object) -> str:
    """A micro-batch's entries with dtype and shape, such as `input_ids int64 (4, 128), labels int64 (4,)`."""
    if isinstance(batch, Mapping):
        shown = [f"{str(key)[:_MAX_NAME]} {_kind(value)}" for key, value in islice(batch.items(), _MAX_ENTRIES)]
    elif isinstance(batch, (tuple, list)):
        shown = [_kind(value) for value in batch[:_MAX_ENTRIES]]
    else:
        return _kind(batch)
    more = len(batch) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") or f"an empty {type(batch).__name__}"


def _kind(value: object) -> str:
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return type(value).__name__


def beyond_embedding(error: IndexError, batch: Mapping[Any, Any], model: nn.Module) -> str | None:
    """Which ids are outside of which embedding, if an embedding raised the error; it is found in the traceback."""
    found = _embedding(error.__traceback__)
    if found is None or not found[0].numel():
        return None
    ids, weight = found
    least, most, rows = int(ids.min()), int(ids.max()), len(weight)
    named = (name for name, parameter in model.named_parameters() if parameter is weight)
    text = f"{error}: the embedding {next(named, 'of the model')} has {rows} rows, so that it requires ids from 0 to "
    text += f"{rows - 1}, but was given {least} to {most}"
    origin = next((str(key) for key, value in batch.items() if _has_range(value, least, most)), None)
    if origin is None and least == 0 and most == ids.shape[-1] - 1:
        return (
            f"{text}, the positions of sequences of length {most + 1}. Truncate the samples to {rows} (a tokenizer "
            f"with truncation=True, max_length={rows}), or make a model with more positions"
        )
    if least < 0:
        advice = "negative values, such as -100, belong only in labels; pad inputs with the id of the padding token"
    else:
        advice = "do the tokenizer and the model fit? model.resize_token_embeddings(len(tokenizer)) adds rows"
    return f"{text}{f' in {origin!r}' if origin else ''}: {advice}"


def _embedding(traceback: TracebackType | None) -> tuple[Tensor, Tensor] | None:
    """(ids, weight) of the embedding that raised."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "embedding" and frame.f_globals.get("__name__") == "torch.nn.functional":
            ids, weight = frame.f_locals.get("input"), frame.f_locals.get("weight")
            return (ids, weight) if isinstance(ids, Tensor) and isinstance(weight, Tensor) else None
        traceback = traceback.tb_next
    return None


def _has_range(value: object, least: int, most: int) -> bool:
    if not isinstance(value, Tensor) or value.is_floating_point() or not value.numel():
        return False
    return int(value.min()) == least and int(value.max()) == most
