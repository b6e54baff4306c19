"""Writes the model card of a run: metadata for model hubs, results, settings and versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import yaml
from torch import nn

from onstep.config import TrainingArguments
from onstep.record.kinds import Metrics
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
_OF_TRAINING = ("train_loss", "train_runtime", "total_tokens", "total_flos")


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
    base = given.get("base_model") or _base_of(model)
    tags = list(dict.fromkeys([*_listed(given.get("tags")), "generated_from_trainer", "onstep"]))
    library = {}
    if hasattr(model, "save_pretrained"):
        library = {"library_name": "peft" if hasattr(model, "peft_config") else "transformers"}
    metadata = {**library, **given, "base_model": base, "tags": tags, "model_name": name}
    shown = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False)
    history = [] if run is None else run.info.log_history
    sections = [
        f"---\n{shown}---\n",
        f"# {name}\n",
        _origin(base, _listed(dataset) or _listed(given.get("datasets")), _listed(dataset_args)),
        _results(history),
        "## Settings\n\n"
        + _items({key: getattr(args, key) for key in _SETTINGS} | ({} if run is None else {"ranks": run.world.size})),
        "## Versions\n\n" + _items({"python": platform.python_version(), **_versions()}),
    ]
    return "\n".join(section for section in sections if section)


def _origin(base: object, datasets: list[str], configurations: list[str]) -> str:
    how = f"Fine-tuned from `{base}`" if base else "Trained from scratch"
    data = f" on {', '.join(datasets)}" if datasets else ""
    which = f" ({', '.join(configurations)})" if datasets and configurations else ""
    return f"{how}{data}{which} with Onstep.\n"


def _results(history: list[Metrics]) -> str:
    """The last training's totals, and a table of its evaluations."""
    final: Metrics = next((one for one in reversed(history) if "train_runtime" in one), {})
    totals = {key: final[key] for key in _OF_TRAINING if key in final}
    evaluations = [one for one in history if any(key.startswith("eval_") for key in one)]
    timing = ("_runtime", "_per_second")
    columns = list(dict.fromkeys(key for one in evaluations for key in one if key.startswith("eval_")))
    columns = [key for key in columns if not key.endswith(timing)]
    if not totals and not columns:
        return ""
    parts = ["## Results\n", _items(totals) if totals else ""]
    if columns:
        heads = ["step", "epoch", *columns]
        rows = [[_shown(one.get(key, "")) for key in heads] for one in evaluations]
        table = [heads, ["---"] * len(heads), *rows]
        parts.append("".join(f"| {' | '.join(row)} |\n" for row in table))
    return "\n".join(part for part in parts if part)


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


def _items(values: Mapping[str, object]) -> str:
    return "".join(f"- {key}: {_shown(value)}\n" for key, value in values.items())


def _shown(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
