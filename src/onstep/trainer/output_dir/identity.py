"""Determines what a Trainer's run learns from: its data, the user's loss and model code, and the initial weights."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from onstep.config import TrainingArguments
from onstep.data.corpus.input_files import InputFiles
from onstep.trainer.base_trainer import BaseTrainer
from onstep.trainer.computing.custom_step import METHODS
from onstep.trainer.loaders.users_data import LOADING
from onstep.training.runs.fingerprints import (
    arrow_entries,
    attributes,
    digest_of,
    is_arrow_dataset,
    is_scalar,
    sampled,
    structure,
    tensor_digest,
)
from onstep.training.runs.identity import Identity
from onstep.training.runs.user_code import is_users, names_in, reachable

_LEARNING = (
    *METHODS,
    *LOADING,
    "_set_signature_columns_if_needed",
    "_wrap_model",
    "call_model_init",
    "compute_loss",
    "create_optimizer",
    "create_optimizer_and_scheduler",
    "create_scheduler",
    "get_decay_parameter_names",
    "get_optimizer_cls_and_kwargs",
)
"""Methods whose overrides determine what is learned. Those that evaluate, report or save do not."""
_ROWS = 4096
"""Rows of a list that are looked at."""
_NUMBERS = 1_000_000
_COLUMNS = 64
_OF_THE_SOURCE = ("_name_or_path", "transformers_version", "_commit_hash")
"""Entries of a model's `config` that say where it came from."""
_TENSOR_VALUES = 2**22
"""Bytes of the initial weights that are hashed in all, evenly spread."""


def trainer_identity(trainer: BaseTrainer) -> Identity:
    """The identity of the run that the Trainer is about to start. Its model must have been created.

    No item of a dataset is read.
    """
    parts = {
        "train_data": _data_entries(trainer.train_dataset),
        "code": dict(_code_entries(trainer)),
        "weights": {} if trainer.model is None else _weight_entries(trainer.model),
    }
    if trainer.eval_dataset is not None:
        parts["eval_data"] = _data_entries(trainer.eval_dataset)
    return Identity({name: _part(entries) for name, entries in parts.items()})


def _part(entries: Mapping[str, str]) -> InputFiles:
    text = "\n".join(f"{name}\0{digest}" for name, digest in sorted(entries.items()))
    return InputFiles(hashlib.blake2b(text.encode(), digest_size=16).hexdigest(), dict(entries))


def _data_entries(dataset: Any) -> dict[str, str]:
    """Digests by column for rows and tables, by attribute for a class of the user."""
    if isinstance(dataset, DataLoader):
        own = {"the DataLoader": digest_of((dataset.batch_size, type(dataset.sampler).__name__, dataset.drop_last))}
        return {**_data_entries(dataset.dataset), **own}
    if isinstance(dataset, Mapping):
        sets = {name: _data_entries(one) for name, one in dataset.items()}
        return {f"{name}: {entry}": digest for name, one in sets.items() for entry, digest in one.items()}
    if is_arrow_dataset(dataset):
        return arrow_entries(dataset)
    if isinstance(dataset, (list, tuple)):
        return _row_entries(dataset)
    own = attributes(dataset) if _is_open(dataset) else {}
    plain = {name: value for name, value in own.items() if is_scalar(value)}
    entries = {name: digest_of(value) for name, value in own.items() if name not in plain}
    roots = ("__getitem__", "__getitems__", "__iter__", "__len__")
    entries |= {f"{name}()": digest_of(function) for name, function in reachable(type(dataset), roots).items()}
    entries |= {f".{name}": digest_of(value) for name, value in plain.items()}
    return {**entries, "its class": digest_of(type(dataset).__qualname__.rpartition("<locals>.")[2])}


def _is_open(dataset: Any) -> bool:
    """Whether a dataset's attributes are its content: those of a library may be caches."""
    return is_users(type(dataset).__module__) or type(dataset).__module__.startswith("torch.utils.data")


def _row_entries(rows: Sequence[Any]) -> dict[str, str]:
    chosen = [rows[position] for position in sampled(len(rows), _ROWS)]
    entries = {"the number of rows": str(len(rows))}
    columns = list(chosen[0]) if chosen and all(isinstance(row, Mapping) for row in chosen) else []
    if not 0 < len(columns) <= _COLUMNS or not all(isinstance(name, str) for name in columns):
        return {**entries, "the rows": digest_of(chosen)}
    for name in columns:  # of numbers, such as labels, all are looked at
        is_number = isinstance(chosen[0].get(name), (int, float)) and len(rows) <= _NUMBERS
        entries[name] = digest_of(
            [row.get(name) for row in (rows if is_number else chosen) if isinstance(row, Mapping)]
        )
    return entries


def _code_entries(trainer: BaseTrainer) -> Iterator[tuple[str, str]]:
    cls, own = type(trainer), vars(trainer)
    methods = reachable(cls, _LEARNING)
    yield from ((name, digest_of(function)) for name, function in methods.items())
    assigned = {name: own[name] for name in _LEARNING if name in own}
    yield from ((f"trainer.{name}", digest_of(function)) for name, function in assigned.items())
    names = {name for function in methods.values() for name in names_in(function.__code__)}
    for name in sorted(names & own.keys() - trainer.library_attributes):
        yield f"trainer.{name}", digest_of(own[name])
    known = {field.name for field in fields(TrainingArguments)}
    for name in sorted(names & vars(trainer.args).keys() - known):
        yield f"args.{name}", digest_of(vars(trainer.args)[name])
    for name in ("compute_loss_func", "optimizer_cls_and_kwargs"):
        if getattr(trainer, name) is not None:
            yield name, digest_of(getattr(trainer, name))
    if trainer.data_collator is not None:
        plain = {name: value for name, value in attributes(trainer.data_collator).items() if is_scalar(value)}
        yield "data_collator", digest_of((trainer.data_collator, plain))
    for name in ("optimizer", "lr_scheduler"):
        if own.get(name) is not None:
            yield name, _optimizer_digest(own[name])
    if trainer.model is not None:
        yield from _forward_entries(trainer.model)


def _optimizer_digest(optimizer: Any) -> str:
    """Of an optimizer the class and settings; of a factory its code."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return digest_of(optimizer)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return digest_of((type(optimizer).__qualname__, groups))


def _forward_entries(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The user's `forward` methods of the model and its parts."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    found = {name: function for cls in classes for name, function in reachable(cls, ("forward",)).items()}
    yield from ((name, digest_of(function)) for name, function in sorted(found.items()))
    if "forward" in vars(model):
        yield "model.forward", digest_of(vars(model)["forward"])


def _weight_entries(model: nn.Module) -> dict[str, str]:
    """A digest of each parameter and buffer, and of how the model is built."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    limit = max(64, _TENSOR_VALUES // max(1, len(tensors)))
    entries = {name: tensor_digest(value, limit) for name, value in tensors.items()}
    entries["the architecture"] = digest_of(structure(model))
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        entries["the configuration"] = digest_of({k: v for k, v in to_dict().items() if k not in _OF_THE_SOURCE})
    return entries
