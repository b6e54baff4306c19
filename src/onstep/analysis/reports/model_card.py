"""Writes the model card of a run from its run.json and its record: metadata for model hubs, data, results, versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from onstep.analysis.logs.record_file import objects_in
from onstep.analysis.logs.run_status import run_record
from onstep.analysis.logs.task_results import Evaluation, evaluations_of_run, metric_words
from onstep.config import KEYS
from onstep.config.section import ChangeClass
from onstep.record.history import history_of
from onstep.record.kinds import FILE_NAME as RECORD
from onstep.record.kinds import Metrics

CARD_FILE = "README.md"
_OF_TRAINING = ("first_loss", "last_loss", "train_loss", "train_runtime", "total_tokens", "total_flos")
_OF_DATASETS = "datasets/"
"""Begins the names of datasets among a run's revisions of the Hub."""
_TIMINGS = ("_runtime", "_per_second")
_MOST_ROWS = 50
"""Evaluations in the table: the last ones."""
_MOST_SETTINGS = 100
_OF_PRETRAIN = ("model", "dataset", "tokenizer")
"""Sections of the configuration that describe nothing of a Trainer's run."""


@dataclass(frozen=True)
class Card:
    """The facts of a card, beside those that its run has recorded."""

    name: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the head; what is empty is left out."""
    base: str | None = None
    """What was fine-tuned; None for a model that was trained from scratch."""
    datasets: Sequence[str] = ()
    """Names of the data, for readers."""
    configurations: Sequence[str] = ()
    history: Sequence[Metrics] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    evaluations: Sequence[Evaluation] = ()
    """Results of lm-eval's tasks for these weights."""
    is_base_known: bool = True
    """Whether it is known where the weights came from."""


def model_card(card: Card, run: Mapping[str, Any] | None = None) -> str:
    """The card as Markdown.

    Args:
        card: its facts.
        run: the content of run.json, for what the data was; None for no run.
    """
    revision = _models(run or {}).get(str(card.base))
    metadata = {**card.metadata, "model_name": card.name, "model-index": _model_index(card)}
    shown = yaml.safe_dump({key: value for key, value in metadata.items() if value}, sort_keys=False)
    sections = [
        f"---\n{shown}---\n",
        f"# {card.name}\n",
        _origin(card, revision),
        _section("Data", _items(_data_facts(run or {}))),
        _results(card.history),
        _section("Tasks", _tasks(card.evaluations)),
        _section("Tasks, a part of the questions", _tasks(card.evaluations, of_parts=True)),
        _section("Settings", _items(card.settings)),
        _section("Versions", _items(card.versions)),
    ]
    return "\n".join(section for section in sections if section)


def card_of_run(directory: Path, name: str | None = None, step: int | None = None) -> str:
    """The card of the weights of a run after `step`; None is its last step.

    Paths are shown by their last part, since a card is published.
    """
    run = run_record(directory)
    config = _mapping(run.get("config"))
    evaluations = [one for one in _readable(directory) if step is None or one.step == step]
    lines = [one for one in objects_in(directory / RECORD) if step is None or _step(one) <= step]
    pretrained = _mapping(config.get("checkpoint")).get("pretrained_checkpoint")
    base = base_on_hub(run)
    peft = _mapping(config.get("peft")).get("peft_scheme")
    metadata = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": base,
        "tags": ["onstep", *([str(peft)] if peft else [])],
    }
    card = Card(
        name or str(run.get("name") or directory.name),
        metadata,
        base or (_last_part(pretrained) if isinstance(pretrained, str) else None),
        history=history_of(lines),
        settings=({} if step is None else {"step": step})
        | _settings({key: one for key, one in config.items() if not (_is_of_trainer(run) and key in _OF_PRETRAIN)}),
        versions={str(key): str(value) for key, value in _mapping(run.get("versions")).items()},
        evaluations=evaluations,
        is_base_known=not _is_of_trainer(run),
    )
    return model_card(card, run)


def base_on_hub(run: Mapping[str, Any]) -> str | None:
    """The name on the Hub of the model that a run started from, by its run.json; None for another place or none."""
    return next(iter(_models(run)), None)


def _models(run: Mapping[str, Any]) -> dict[str, str]:
    """The commits of models on the Hub in a run.json, by name."""
    revisions = _mapping(run.get("hub_revisions"))
    return {str(name): str(commit) for name, commit in revisions.items() if not str(name).startswith(_OF_DATASETS)}


def _is_of_trainer(run: Mapping[str, Any]) -> bool:
    """Whether the model and its data are objects of a script, which the configuration does not describe."""
    return run.get("layout") == "hugging_face"


def _readable(directory: Path) -> list[Evaluation]:
    try:
        return evaluations_of_run(directory)
    except OSError:
        return []


def _step(line: Mapping[str, Any]) -> int:
    step = line.get("global_step")
    return step if isinstance(step, int) else 0


def _origin(card: Card, revision: str | None) -> str:
    without = "Trained from scratch" if card.is_base_known else "Trained"
    at = f" (revision {revision})" if revision else ""
    how = f"Fine-tuned from `{card.base}`{at}" if card.base else without
    data = f" on {', '.join(card.datasets)}" if card.datasets else ""
    which = f" ({', '.join(card.configurations)})" if card.datasets and card.configurations else ""
    return f"{how}{data}{which} with Onstep.\n"


def _data_facts(run: Mapping[str, Any]) -> dict[str, str]:
    """Which data and tokenizer the run read, with the digests by which Onstep recognizes them."""
    config = _mapping(run.get("config"))
    dataset, digests = _mapping(config.get("dataset")), _mapping(run.get("identity"))
    paths = [_last_part(path) for path in dataset.get("paths") or () if isinstance(path, str)]
    found = {"kind": str(dataset["kind"])} if "kind" in dataset and "data" in digests else {}
    found |= {"files": ", ".join(paths)} if paths else {}
    found |= {f"digest of {str(name).replace('_', ' ')}": str(digest) for name, digest in digests.items()}
    tokenizer = _mapping(run.get("tokenizer")).get("fingerprint")
    found |= {"tokenizer": str(tokenizer)} if tokenizer else {}
    revisions = {str(name): commit for name, commit in _mapping(run.get("hub_revisions")).items()}
    of_data = revisions.keys() - _models(run).keys()
    return found | {name: f"revision {commit}" for name, commit in revisions.items() if name in of_data}


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that decide what is learned and that are not at their defaults; paths by their last part."""
    found = {}
    for key in KEYS.values():
        section, _, name = key.name.rpartition(".")
        value = _mapping(config.get(section)).get(name, key.default)
        if key.option.on_change is not ChangeClass.SAFE and value != key.default and not isinstance(value, dict):
            found[key.name] = _last_part(value) if isinstance(value, str) else value
    without = ("dataset.paths", "tokenizer.tokenizer_model", "checkpoint.pretrained_checkpoint")
    return dict(islice(((key, value) for key, value in found.items() if key not in without), _MOST_SETTINGS))


def _last_part(path: str) -> str:
    """The name of a file, without the directories or the host, the password and the query that lead to it.

    A name of the Hub, such as `owner/name`, is left as it is.
    """
    if "://" in path:
        return path.partition("?")[0].rstrip("/").rpartition("/")[2]
    return Path(path).name if path.startswith(("/", "~", ".")) or path.rstrip("/").count("/") > 1 else path


def _results(history: Sequence[Metrics]) -> str:
    """The last training's totals, and a table of its evaluations."""
    final: Metrics = next((one for one in reversed(history) if "train_runtime" in one), {})
    totals = {key: final[key] for key in _OF_TRAINING if key in final}
    evaluations = [one for one in history if any(key.startswith("eval_") for key in one) and "tasks" not in one]
    columns = list(dict.fromkeys(key for one in evaluations for key in one if key.startswith("eval_")))
    columns = [key for key in columns if not key.endswith(_TIMINGS)]
    heads = ["step", "epoch", *columns]
    rows = list(dict.fromkeys(tuple(_shown(one.get(key, "")) for key in heads) for one in evaluations))[-_MOST_ROWS:]
    parts = [_items(totals), _table(heads, rows) if columns else ""]
    return _section("Results", "\n".join(part for part in parts if part))


def _tasks(evaluations: Sequence[Evaluation], *, of_parts: bool = False) -> str:
    """The newest results of all questions; with `of_parts`, those of tasks that have only results of a part."""
    results = [(name, result) for one in evaluations for name, result in one.tasks.items()]
    full = {name: result for name, result in results if result.limit is None}
    newest = {name: result for name, result in results if name not in full} if of_parts else full
    heads = ["task", "shots", "questions", "result", "lm-eval"]
    rows = [
        [name, _shown(result.num_fewshot), _shown(result.num_samples), ", ".join(metric_words(result)), result.lm_eval]
        for name, result in newest.items()
    ]
    return _table(heads, rows) if rows else ""


def _model_index(card: Card) -> list[dict[str, Any]]:
    """The results of tasks in the form of model hubs, without those of a part of the questions."""
    full = {name: result for one in card.evaluations for name, result in one.tasks.items() if result.limit is None}
    results = [
        {
            "task": {"type": "text-generation"},
            "dataset": {"type": name, "name": name},
            "metrics": [{"type": metric, "value": value} for metric, value in result.metrics.items()],
        }
        for name, result in full.items()
    ]
    return [{"name": card.name, "results": results}] if results else []


def _section(title: str, content: str) -> str:
    return f"## {title}\n\n{content}" if content else ""


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in [heads, ["---"] * len(heads), *rows])


def _items(values: Mapping[str, object]) -> str:
    return "".join(f"- {key}: {_shown(value)}\n" for key, value in values.items())


def _shown(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
    return text.replace("\n", " ").replace("|", "\\|")


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
