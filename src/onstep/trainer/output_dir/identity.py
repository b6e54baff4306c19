"""Determines what a Trainer's run learns from: its data, the user's loss and model code, and the initial weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields

import torch
from torch import nn
from torch.utils.data import DataLoader

from onstep.config import TrainingArguments
from onstep.data import Batch
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
from onstep.training.runs.identity import VALUES, Identity
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
_OF_A_MODEL = ("forward", "training_step", "configure_optimizers")
"""Methods of a model that determine what is learned; the last two are those of a LightningModule."""
ARCHITECTURE = "the architecture"
"""Entry of the weights: how the model is built."""
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
        "train_data": _data(trainer.train_dataset),
        "code": _code(trainer),
        "weights": {} if trainer.model is None else _weights(trainer.model),
    }
    if trainer.eval_dataset is not None:
        parts["eval_data"] = _data(trainer.eval_dataset)
    return Identity({name: _part(values) for name, values in parts.items()})


def _part(values: Mapping[str, object]) -> InputFiles:
    digests = {name: digest_of(value) for name, value in values.items()}
    text = "\n".join(f"{name}\0{digest}" for name, digest in sorted(digests.items()))
    return InputFiles(f"{VALUES}{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}", digests)


def _data(dataset: object) -> dict[str, object]:
    """The columns of rows and tables, the attributes and methods of a class of the user."""
    if isinstance(dataset, DataLoader):
        settings = (dataset.batch_size, type(dataset.sampler).__name__, dataset.drop_last)
        return {**_data(dataset.dataset), "the DataLoader": settings}
    if isinstance(dataset, Mapping):
        return {f"{name}: {entry}": value for name, one in dataset.items() for entry, value in _data(one).items()}
    if is_arrow_dataset(dataset):
        return dict(arrow_entries(dataset))
    if isinstance(dataset, (list, tuple)):
        return _rows(dataset)
    cls = type(dataset)
    is_open = is_users(cls.__module__) or cls.__module__.startswith("torch.utils.data")  # others may hold caches
    own = attributes(dataset) if is_open else {}
    methods = reachable(cls, ("__getitem__", "__getitems__", "__iter__", "__len__"))
    return {
        **{f".{name}" if is_scalar(value) else name: value for name, value in own.items()},
        **{f"{name}()": function for name, function in methods.items()},
        "its class": cls.__qualname__.rpartition("<locals>.")[2],
    }


def _rows(rows: Sequence[Batch]) -> dict[str, object]:
    chosen = [rows[position] for position in sampled(len(rows), _ROWS)]
    values: dict[str, object] = {"the number of rows": len(rows)}
    columns = list(chosen[0]) if chosen and all(isinstance(row, Mapping) for row in chosen) else []
    if not 0 < len(columns) <= _COLUMNS or not all(isinstance(name, str) for name in columns):
        return {**values, "the rows": chosen}
    for name in columns:  # of numbers, such as labels, all are looked at
        is_number = isinstance(chosen[0].get(name), (int, float)) and len(rows) <= _NUMBERS
        looked_at = rows if is_number else chosen
        values[name] = digest_of([row.get(name) for row in looked_at if isinstance(row, Mapping)])
    return values


def _code(trainer: BaseTrainer) -> dict[str, object]:
    """The user's methods and functions that decide what is learned, and the attributes and arguments that they name."""
    own, collator, model = vars(trainer), trainer.data_collator, trainer.model
    methods = reachable(type(trainer), _LEARNING)
    names = {name for function in methods.values() for name in names_in(function.__code__)}
    foreign = names - {field.name for field in fields(TrainingArguments)}
    values: dict[str, object] = {
        **methods,
        **{f"trainer.{name}": own[name] for name in {*_LEARNING, *(names - trainer.library_attributes)} & own.keys()},
        **{f"args.{name}": value for name, value in vars(trainer.args).items() if name in foreign},
        **{name: getattr(trainer, name) for name in ("compute_loss_func", "optimizer_cls_and_kwargs")},
        **{name: _settings(own.get(name)) for name in ("optimizer", "lr_scheduler")},
    }
    if collator is not None:
        plain = {name: value for name, value in attributes(collator).items() if is_scalar(value)}
        values["data_collator"] = (collator, plain)
    if model is not None:
        for cls in dict.fromkeys(type(module) for module in model.modules()):
            values |= reachable(cls, _OF_A_MODEL)
        values["model.forward"] = vars(model).get("forward")
    return {name: value for name, value in values.items() if value is not None}


def _settings(optimizer: object) -> object:
    """Of an optimizer the class and settings; a factory is itself."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return type(optimizer).__qualname__, groups


def _weights(model: nn.Module) -> dict[str, object]:
    """Each parameter and buffer, and how the model is built."""
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    limit = max(64, _TENSOR_VALUES // max(1, len(tensors)))
    values: dict[str, object] = {name: tensor_digest(value, limit) for name, value in tensors.items()}
    values[ARCHITECTURE] = structure(model)
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        values["the configuration"] = {k: v for k, v in to_dict().items() if k not in _OF_THE_SOURCE}
    return values
