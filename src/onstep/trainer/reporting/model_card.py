"""Collects the facts of a Trainer's model card."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch import nn

from onstep.analysis.logs.run_status import run_record
from onstep.analysis.reports.model_card import Card, base_on_hub
from onstep.analysis.reports.model_card import model_card as text_of
from onstep.config import TrainingArguments
from onstep.training.run import Run

Words = str | list[str] | None

_SETTINGS = (
    "learning_rate",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "optim",
    "weight_decay",
    "max_grad_norm",
    "lr_scheduler_type",
    "warmup_steps",
    "seed",
    "bf16",
    "fp16",
)
_LIBRARIES = ("onstep", "torch", "transformers", "datasets", "tokenizers")


def model_card(
    args: TrainingArguments,
    model: nn.Module | None,
    run: Run | None,
    given: Mapping[str, Words],
    *,
    name: str | None,
    dataset: Words,
    dataset_args: Words,
) -> str:
    """The card as Markdown.

    Args:
        args: the `TrainingArguments`.
        model: the module.
        run: the newest run; None before the first.
        given: metadata under the hub's names; what is None is left out, or taken from the model.
        name: None is the name of `args.output_dir`.
        dataset: names of the data, for readers.
        dataset_args: their configurations.
    """
    name = name or Path(str(args.output_dir)).absolute().name
    record = {} if run is None or run.run_dir is None else run_record(run.run_dir.path)
    base = given.get("base_model") or _base_of(model) or base_on_hub(record)
    tags = list(dict.fromkeys([*_listed(given.get("tags")), "generated_from_trainer", "onstep"]))
    library = {}
    if hasattr(model, "save_pretrained"):
        library = {"library_name": "peft" if hasattr(model, "peft_config") else "transformers"}
    card = Card(
        name,
        {**library, **given, "base_model": base, "tags": tags},
        str(base) if base else None,
        _listed(dataset) or _listed(given.get("datasets")),
        _listed(dataset_args),
        [] if run is None else run.info.log_history,
        {key: getattr(args, key) for key in _SETTINGS} | ({} if run is None else {"ranks": run.world.size}),
        {"python": platform.python_version(), **_versions()},
    )
    return text_of(card, record)


def _versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _base_of(model: nn.Module | None) -> str | None:
    """The name that a model of `transformers` was loaded by, unless that is a directory."""
    name = getattr(getattr(model, "config", None), "_name_or_path", None)
    return str(name) if name and not Path(str(name)).is_dir() else None


def _listed(words: Words) -> list[str]:
    return [words] if isinstance(words, str) else list(words or ())
