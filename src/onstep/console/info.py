"""Prints the sizes of batch, run and model when training begins."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pprint import pformat
from typing import TYPE_CHECKING, Any

from onstep.config import TrainingArguments
from onstep.console.formats import format_si
from onstep.console.line_writer import LineWriter
from onstep.events import RunState, TrainerCallback

if TYPE_CHECKING:
    from torch import nn

_LONGEST_ON_ONE_LINE = 80
_UNAVAILABLE = "Unavailable"


class InfoCallback(TrainerCallback):
    """Prints batch sizes, sample counts and parameter counts when training begins.

    Every entry is a line ``[INFO|info_logger] key: value`` on standard output; values longer than 80 characters get
    separate lines. Values that the trainer does not know are "Unavailable".

    Args:
        verbose: Also print arguments, state, tokenizer, optimizer, scheduler, data loaders and model, at level DEBUG.
        brief: Print two plain lines instead, as `onstep train` and `Trainer` do unless `logger.console=verbose`.
    """

    reads_weights = False
    ranks = "main"

    def __init__(self, verbose: bool = False, *, brief: bool = False) -> None:
        self.verbose, self.brief = verbose, brief
        self._lines = LineWriter("info_logger")

    def on_train_begin(self, args: TrainingArguments, state: RunState, control: object, **kwargs: object) -> None:
        """Print the known values."""
        if not state.is_world_process_zero:
            return
        entries = {**_batches(args, state), **_sizes(kwargs.get("model"))}
        if self.brief:
            for line in _in_brief(entries):
                self._lines.write(line)
        else:
            self._print(logging.INFO, entries)
        if self.verbose:
            self._print(logging.DEBUG, _objects(args, state, kwargs))

    def _print(self, level: int, entries: Mapping[str, object]) -> None:
        prefix = f"[{logging.getLevelName(level)}|info_logger] "
        for key, value in entries.items():
            text = str(value)
            is_long = len(text) > _LONGEST_ON_ONE_LINE
            self._lines.write(f"{key}:\n{text}\n" if is_long else f"{key}: {text}", level, prefix=prefix)


def _in_brief(entries: Mapping[str, Any]) -> list[str]:
    """The sizes of model and run, on a line each; a value that is unknown is left out."""
    count = {name: value for name, value in entries.items() if value not in (_UNAVAILABLE, -1)}
    lines = [_model_in_brief(count)] if "total_parameters" in count else []
    batch = f" of {count['total_train_batch_size']:,} samples" if "total_train_batch_size" in count else ""
    steps = [f"{count['max_steps']:,} steps{batch}"] if "max_steps" in count else []
    samples, examples = count.get("total_train_samples"), count.get("total_examples")
    if samples and examples:
        steps.append(f"{samples / examples:.3g} epochs of {examples:,} samples")
    return [*lines, f"training: {', '.join(steps)}"] if steps else lines


def _model_in_brief(count: Mapping[str, Any]) -> str:
    parts = [f"{count['total_parameters']} parameters"]
    if "whole_model_parameters" in count:
        parts = [f"{count['total_parameters']} of {count['whole_model_parameters']} parameters on this rank"]
    if count["embedding_parameters"] != "0":
        parts.append(f"{count['embedding_parameters']} in embeddings")
    if count["trainable_parameters"] != count["total_parameters"]:
        parts.append(f"{count['trainable_parameters']} of them trained")
    return f"model: {', '.join(parts)}"


def _batches(args: TrainingArguments, state: RunState) -> dict[str, object]:
    """Sample counts (over all ranks) and batch sizes (in samples).

    Counts that the trainer does not provide are estimated from full batches.
    """
    per_device = getattr(args, "per_device_train_batch_size", None)
    accumulation = getattr(args, "gradient_accumulation_steps", None)
    batch = _product(per_device, accumulation, getattr(state, "num_processes", None))
    examples, samples = getattr(state, "num_examples", None), getattr(state, "num_train_samples", None)
    if examples is None:
        examples = _product(batch, getattr(state, "epoch_train_steps", None))
    if samples is None:
        samples = _product(batch, state.max_steps)
    found = {
        "total_examples": examples,
        "total_train_samples": samples,
        "per_device_train_batch_size": per_device,
        "actual_per_device_batch_size": getattr(state, "train_batch_size", None),
        "total_train_batch_size": batch,
        "max_steps": state.max_steps,
    }
    return {name: _UNAVAILABLE if value is None else value for name, value in found.items()}


def _product(*factors: int | None) -> int | None:
    """The product, or None if a factor is unknown or means "no limit" (-1)."""
    known = [factor for factor in factors if factor is not None and factor >= 0]
    return math.prod(known) if len(known) == len(factors) else None


def _sizes(model: Any) -> dict[str, str]:
    """Parameter counts of a model or list of model chunks (this rank's part); shared parameters count once."""
    names = ("total", "trainable", "embedding", "non_embedding")
    if model is None:
        return {**{f"{name}_parameters": _UNAVAILABLE for name in names}, "tied_embeddings": _UNAVAILABLE}
    owners: dict[nn.Parameter, list[bool]] = {}
    for chunk in model if isinstance(model, (list, tuple)) else [model]:
        for module in chunk.modules():
            for parameter in module.parameters(recurse=False):
                # embeddings of all libraries have this attribute, but not all derive from torch's class
                owners.setdefault(parameter, []).append(hasattr(module, "num_embeddings"))
    total = sum(parameter.numel() for parameter in owners)
    trainable = sum(parameter.numel() for parameter in owners if parameter.requires_grad)
    embedding = sum(parameter.numel() for parameter, is_embedding in owners.items() if any(is_embedding))
    is_tied = any(any(is_embedding) and len(is_embedding) > 1 for is_embedding in owners.values())
    values = (total, trainable, embedding, total - embedding)
    sizes = {f"{name}_parameters": format_si(value) for name, value in zip(names, values, strict=True)}
    return {**sizes, **_sizes_of_whole(model), "tied_embeddings": str(is_tied)}


def _sizes_of_whole(model: Any) -> dict[str, str]:
    """The parameter count of the model whose stages a rank of a pipeline has; nothing for a whole model."""
    first = model[0] if isinstance(model, (list, tuple)) else model
    stage = getattr(first, "module", first)
    shapes: Mapping[str, tuple[int, ...]] = getattr(stage, "whole_shapes", {})
    aliases = getattr(stage, "aliases", ())
    total = sum(math.prod(shape) for name, shape in shapes.items() if name not in aliases)
    return {"whole_model_parameters": format_si(total)} if shapes else {}


def _objects(args: TrainingArguments, state: RunState, kwargs: Mapping[str, object]) -> dict[str, str]:
    names = ("processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
    return {
        "args": pformat(_fields(args)),
        "state": pformat(_fields(state)),
        **{name: pformat(kwargs.get(name)) for name in names},
        "model": str(kwargs.get("model")),
    }


def _fields(thing: object) -> object:
    """The attributes of `thing` as a dictionary; `to_dict` is preferred because it omits secrets."""
    to_dict = getattr(thing, "to_dict", None)
    if callable(to_dict):
        return to_dict()
    return vars(thing) if hasattr(thing, "__dict__") else thing
