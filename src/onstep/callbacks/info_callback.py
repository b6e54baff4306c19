"""Says at the start of training what is about to be trained, on how much, in what batches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pprint import pformat
from typing import Any

from onstep.events import TrainerCallback
from onstep.metrics.console import LineWriter
from onstep.metrics.formatting import format_si

_LONGEST_ON_ONE_LINE = 80
_UNAVAILABLE = "Unavailable"


class InfoCallback(TrainerCallback):
    """Prints batch sizes, sample counts and parameter counts when training begins.

    Every entry is a line ``[INFO|info_logger] key: value`` on the standard output; a value longer than 80 characters
    stands on lines of its own. What a trainer does not know is "Unavailable".

    Args:
        verbose: Also print arguments, state, tokenizer, optimizer, scheduler, data loaders and model, at level DEBUG.
    """

    ranks = "main"

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose
        level = logging.DEBUG if verbose else logging.INFO
        self._lines = LineWriter("info_logger", "[%(levelname)s|%(name)s] %(message)s", level=level)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print what is known."""
        if not state.is_world_process_zero:
            return
        self._print(logging.INFO, {**_batches(args, state), **_sizes(kwargs.get("model"))})
        if self.verbose:
            self._print(logging.DEBUG, _objects(args, state, kwargs))

    def _print(self, level: int, entries: Mapping[str, Any]) -> None:
        for key, value in entries.items():
            text = str(value)
            is_long = len(text) > _LONGEST_ON_ONE_LINE
            self._lines.write(f"{key}:\n{text}\n" if is_long else f"{key}: {text}", level)


def _batches(args: Any, state: Any) -> dict[str, Any]:
    """Sample counts (over all ranks) and batch sizes (in samples).

    A trainer that does not tell its counts has those of whole batches.
    """
    per_device = getattr(args, "per_device_train_batch_size", None)
    accumulation = getattr(args, "gradient_accumulation_steps", None)
    batch = _product(per_device, accumulation, getattr(state, "num_processes", None))
    examples, samples = getattr(state, "num_examples", None), getattr(state, "num_train_samples", None)
    if examples is None:
        examples = _product(batch, getattr(state, "epoch_train_steps", None))
    if samples is None:
        samples = _product(batch, state.max_steps)
    return {
        "total_examples": _shown(examples),
        "total_train_samples": _shown(samples),
        "per_device_train_batch_size": _shown(per_device),
        "actual_per_device_batch_size": _shown(getattr(state, "train_batch_size", None)),
        "total_train_batch_size": _shown(batch),
        "max_steps": _shown(state.max_steps),
    }


def _product(*factors: int | None) -> int | None:
    """The product, or None where a factor is unknown or stands for "no limit" (-1)."""
    product = 1
    for factor in factors:
        if factor is None or factor < 0:
            return None
        product *= factor
    return product


def _shown(value: int | None) -> int | str:
    return _UNAVAILABLE if value is None else value


@dataclass
class _ParameterCounts:
    """Elements of a model's parameters; a shared one counts once."""

    total: int = 0
    trainable: int = 0
    embedding: int = 0
    has_tied_embeddings: bool = False


def _count(modules: Iterable[Any]) -> _ParameterCounts:
    counts = _ParameterCounts()
    owners: dict[int, list[bool]] = {}
    parameters: dict[int, Any] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            # embeddings of any library have this attribute, not all of them derive from torch's
            owners.setdefault(id(parameter), []).append(hasattr(module, "num_embeddings"))
            parameters[id(parameter)] = parameter
    for identity, parameter in parameters.items():
        is_embedding = any(owners[identity])
        counts.total += parameter.numel()
        counts.trainable += parameter.numel() if parameter.requires_grad else 0
        counts.embedding += parameter.numel() if is_embedding else 0
        counts.has_tied_embeddings |= is_embedding and len(owners[identity]) > 1
    return counts


def _sizes(model: Any) -> dict[str, str]:
    """Parameter counts of a model or of a list of model chunks (this rank's part of it)."""
    names = ("total", "trainable", "embedding", "non_embedding")
    if model is None:
        return {**{f"{name}_parameters": _UNAVAILABLE for name in names}, "tied_embeddings": _UNAVAILABLE}
    chunks = model if isinstance(model, (list, tuple)) else [model]
    counts = _count(module for chunk in chunks for module in chunk.modules())
    values = (counts.total, counts.trainable, counts.embedding, counts.total - counts.embedding)
    sizes = {f"{name}_parameters": format_si(value) for name, value in zip(names, values, strict=True)}
    return {**sizes, "tied_embeddings": str(counts.has_tied_embeddings)}


def _objects(args: Any, state: Any, kwargs: Mapping[str, Any]) -> dict[str, str]:
    names = ("processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
    return {
        "args": pformat(_fields(args)),
        "state": pformat(_fields(state)),
        **{name: pformat(kwargs.get(name)) for name in names},
        "model": str(kwargs.get("model")),
    }


def _fields(thing: Any) -> Any:
    """A dictionary of what `thing` holds; `to_dict` is asked first, because it leaves secrets out."""
    to_dict = getattr(thing, "to_dict", None)
    if callable(to_dict):
        return to_dict()
    return vars(thing) if hasattr(thing, "__dict__") else thing
