"""`onstep evaluate`: evaluates the weights of a run, a checkpoint or a directory on tasks of lm-eval."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from onstep.analysis.logs.run_status import run_record
from onstep.analysis.logs.task_results import append_evaluation, metric_words
from onstep.analysis.text_tables import printable, table
from onstep.cli.completed_words import complete_checkpoints
from onstep.cli.runs import find_named, not_found, run_names
from onstep.errors import CheckpointError, ConfigError, OnstepError
from onstep.files.bounded_reading import integer_from_environment, read_json
from onstep.stores.urls import is_url

if TYPE_CHECKING:
    from onstep.analysis.logs.task_results import TaskResult

_ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class Weights:
    """What is evaluated, in the terms of lm-eval's model of `transformers`."""

    model: str
    """The directory of `transformers`."""
    name: str
    """What the results are named after, such as `checkpoint-200`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of lm-eval's `HFLM`."""
    run: Path | None = None
    """The directory of the run that has these weights; None for weights without a run."""
    step: int | None = None


def evaluate(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_checkpoints,
            help="A run (a path, or a name below runs/: its final weights, else its newest checkpoint), a checkpoint "
            "(RUN@STEP, RUN@best), a Hugging Face directory, or a GGUF file.",
        ),
    ],
    tasks: Annotated[
        list[str],
        typer.Option("--tasks", "-t", help="Tasks, groups, tags or patterns of lm-eval, separated by commas."),
    ],
    include_path: Annotated[
        list[str] | None, typer.Option(metavar="DIR", help="Directory with task files (YAML) of your own.")
    ] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Solved examples before each question.")] = None,
    limit: Annotated[
        float | None, typer.Option(help="Questions of each task, or a share of them below 1; for a quick look.")
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Sequences at a time, or auto.")] = "1",
    device: Annotated[str | None, typer.Option(help="Default: cuda, or cpu without a GPU.")] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Ask each question as a turn of a conversation.")
    ] = False,
    trust_task_code: Annotated[
        bool,
        typer.Option(
            "--trust-task-code",
            help="Execute the Python functions that task files of your own name (!function), and metrics of the "
            "library evaluate. Read them first.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: {weights, step, tasks: {...}}.")] = False,
) -> None:
    """Evaluate weights on tasks of lm-eval: the numbers are those of `lm_eval --model hf` on the exported directory.

    The results of a run become part of it: onstep why RUN and onstep logs report RUN show them. Requires
    onstep[lm-eval].
    """
    if (ranks := integer_from_environment("WORLD_SIZE", 1)) > 1:
        raise ConfigError(f"onstep evaluate is one process, but $WORLD_SIZE is {ranks}; start it without torchrun.")
    import torch

    from onstep.models.hf.tasks import TaskSettings, evaluate_tasks, import_lm_eval, load_tasks

    if not (batch_size.startswith("auto") or (batch_size.isdecimal() and int(batch_size) > 0)):
        raise ConfigError(f"--batch-size must be an integer >= 1 or auto, got {batch_size!r}.")
    if limit is not None and not limit > 0:
        raise ConfigError(f"--limit must be > 0, got {limit:g}; drop it for all questions.")
    names = tuple(name for words in tasks for name in words.split(",") if name)
    settings = TaskSettings(
        names, tuple(include_path or ()), num_fewshot, limit, batch_size, apply_chat_template, trust_task_code
    )
    import_lm_eval()
    with weights_of(path) as weights:
        load_tasks(settings)  # before a large model is read
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        results = evaluate_tasks(settings, weights.model, device=device, **weights.arguments)
    if weights.run is not None:
        append_evaluation(weights.run, weights.step, weights.name, results)
    if as_json:
        content = {name: asdict(result) for name, result in results.items()}
        print(json.dumps({"weights": weights.name, "step": weights.step, "tasks": content}, indent=2))
        return
    at = "" if weights.step is None else f" of step {weights.step}"
    print(printable(f"{path}: {weights.name}{at}"))
    print(
        "\n".join(table([("TASK", "N-SHOT", "QUESTIONS", "RESULT"), *map(_row, results.items())], "<>><", indent="  "))
    )
    if weights.run is not None:
        print(printable(f"Kept in {weights.run}; onstep why and onstep logs report show it."))


def _row(item: tuple[str, TaskResult]) -> tuple[str, str, str, str]:
    name, result = item
    counts = ("-" if one is None else str(one) for one in (result.num_fewshot, result.num_samples))
    return (printable(name), *counts, ", ".join(metric_words(result)))  # type: ignore[return-value]


@contextmanager
def weights_of(words: str) -> Iterator[Weights]:
    """The weights that `words` name; those of a checkpoint of Onstep's own are exported to a temporary directory.

    Raises:
        OnstepError: if there are none, or they cannot be opened by `transformers`.
    """
    if is_url(words):
        from onstep.mirror.copies import trained_copy

        words = str(trained_copy(words))
    found = find_named(words)
    if found is not None and found.is_file():
        yield _of_gguf(found)
        return
    if found is not None and not (found / "run.json").is_file() and (ready := _of_directory(found)) is not None:
        yield ready
        return
    if found is not None and (final := _final_weights(found)) is not None:
        yield final
        return
    with tempfile.TemporaryDirectory(prefix="onstep-evaluate-") as directory:
        yield _of_checkpoint(words, Path(directory) / "model")


def _of_gguf(path: Path) -> Weights:
    from onstep.models.hf.gguf_types import check_gguf_file

    if path.suffix.lower() != ".gguf":
        raise ConfigError(f"{path} is a file; name a run, a checkpoint, a Hugging Face directory or a .gguf file.")
    check_gguf_file(path)
    return Weights(str(path.parent), path.name, {"gguf_file": path.name})


def _of_directory(directory: Path, run: Path | None = None, step: int | None = None) -> Weights | None:
    """The weights in a directory of `transformers` or `peft`; None if it is neither."""
    if (directory / "config.json").is_file():
        if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise OnstepError(
                f"{directory} has no tokenizer, which tasks require; save it there: "
                f"tokenizer.save_pretrained({str(directory)!r}), or pass processing_class to the Trainer."
            )
        return Weights(str(directory), directory.name, {}, run, step)
    if (directory / _ADAPTER).is_file():
        content = read_json(directory / _ADAPTER, error=OnstepError)
        base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
        if not isinstance(base, str):
            raise OnstepError(
                f"{directory} has an adapter that names no base model; set base_model_name_or_path in {_ADAPTER}."
            )
        return Weights(base, directory.name, {"peft": str(directory)}, run, step)
    return None


def _final_weights(directory: Path) -> Weights | None:
    """The final weights of a run; None if the directory is not that of a run, or has none."""
    from onstep.training.runs.run_dir import RunDir

    if not (directory / "run.json").is_file():
        return None
    step = run_record(directory).get("step")
    return _of_directory(RunDir(directory).model, directory, step if isinstance(step, int) else None)


def _of_checkpoint(words: str, target: Path) -> Weights:
    from onstep.cli.checkpoint.export import export_hf, run_of
    from onstep.cli.checkpoint.paths import find

    try:
        info = find(words)
    except CheckpointError as error:
        names = run_names()
        if find_named(words) is None and "@" not in words:
            raise ConfigError(
                f"there is no run, checkpoint, Hugging Face directory or GGUF file {words!r}."
                f"{not_found(words, names, ' There are no runs below runs/.')}"
            ) from error
        raise
    run = run_of(info)
    run = None if run is None else Path(os.path.relpath(run))
    ready = _of_directory(info.path, run, info.step)
    if ready is not None:
        return ready
    export_hf(info, target, force=False, dtype=None)
    exported = _of_directory(target)
    assert exported is not None
    return replace(exported, name=info.path.name, run=run, step=info.step)
