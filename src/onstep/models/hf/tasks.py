"""Evaluates models of `transformers` on the tasks of lm-eval, which does all of the counting."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from textwrap import shorten
from typing import Any

from onstep.analysis.logs.task_results import TaskResult
from onstep.config.suggestions import nearest
from onstep.errors import ConfigError, MissingExtraError, OnstepError, named_text
from onstep.models.hf.task_code import no_foreign_code, replaced

_QUIET = ("lm_eval", "httpx", "datasets", "huggingface_hub")
_NAMED = re.compile(r"^(?:task|group):[ \t]*['\"]?([^'\"#\n]+)", re.MULTILINE)
"""The name in a task file, which may be damaged."""
_LONGEST_REASON = 400


@dataclass(frozen=True)
class TaskSettings:
    """Which tasks are evaluated, and how: the options of the command `lm_eval` of the same names."""

    tasks: tuple[str, ...]
    """Names of tasks, groups or tags, patterns of them, or paths of task files."""
    include_path: tuple[str, ...] = ()
    """Directories with further task files."""
    num_fewshot: int | None = None
    """Solved examples before each question; None is that of the task."""
    limit: float | None = None
    """Number of questions of each task, or below 1 a share of them; None is all."""
    batch_size: int | str = 1
    """Sequences at a time, or `auto`."""
    apply_chat_template: bool = False
    """Whether each question is a turn of the tokenizer's chat template."""
    trust_task_code: bool = False
    """Whether functions that task files name (`!function`), and metrics that are scripts, are executed."""


def import_lm_eval() -> Any:
    """The package `lm_eval`.

    Raises:
        MissingExtraError: if it is not installed.
    """
    try:
        import lm_eval
        import lm_eval.evaluator
        import lm_eval.models.huggingface
        import lm_eval.tasks
    except ImportError as error:
        raise MissingExtraError(
            f"the evaluation of tasks requires lm-eval: pip install 'onstep[lm-eval]' ({error})"
        ) from error
    return lm_eval


def load_tasks(settings: TaskSettings) -> tuple[Any, list[Any]]:
    """lm-eval's task manager, and the tasks and groups with their data.

    The tasks that lm-eval has itself are only looked at if those of `include_path` are not enough, which requires
    seconds. Tasks with local data are loaded without network.

    Raises:
        ConfigError: for a task that does not exist, cannot be loaded or executes code that is not trusted, and for a
            missing directory.
        MissingExtraError: if lm-eval is not installed.
    """
    lm_eval = import_lm_eval()
    for place in settings.include_path:
        if not Path(place).is_dir():
            raise ConfigError(f"--include-path {place} is not a directory; name one with the YAML files of tasks.")
    manager, names = _manager_of(lm_eval, settings)
    try:
        with _quiet(), no_foreign_code(lm_eval, is_trusted=settings.trust_task_code):
            loaded = manager.load(names)
    except OnstepError:
        raise
    except Exception as error:  # tasks are files and code of others
        reason = shorten(named_text(error), _LONGEST_REASON, placeholder=" ...")  # YAML's place is in a later line
        remedy = "correct their files or the paths of their data, which are relative to the working directory."
        if isinstance(error, ConnectionError):
            remedy = (
                "load them once with a network, which keeps their data on this machine, or use tasks with data of your "
                "own (--include-path)."
            )
        raise ConfigError(f"the tasks {', '.join(names)} cannot be loaded ({reason}); {remedy}") from error
    groups = loaded.get("groups") or {}
    below = {name for group in groups.values() for name in group.child_names}
    members = {task.task_name for group in groups.values() for task in group.get_all_tasks()}
    tops = [group for name, group in groups.items() if name not in below]
    return manager, [*tops, *(task for name, task in loaded["tasks"].items() if name not in members)]


def _manager_of(lm_eval: Any, settings: TaskSettings) -> tuple[Any, list[str]]:
    if not settings.tasks:
        raise ConfigError("no task is named; pass --tasks NAME,NAME.")
    include, unknown, known = list(settings.include_path) or None, "", list[str]()
    for has_defaults in (False, True):
        manager = lm_eval.tasks.TaskManager(include_path=include, include_defaults=has_defaults)
        found: list[str] = []
        for name in settings.tasks:
            matches = [name] if Path(name).is_file() else sorted(manager.match_tasks([name]))
            matches = matches or _unread(name, settings, by_file_name=has_defaults)
            if not matches:
                unknown, known = name, manager.all_tasks
                break
            found += matches
        else:
            return manager, list(dict.fromkeys(found))
    own = "" if include is None else f" or below {', '.join(settings.include_path)}"
    raise ConfigError(
        f"there is no task {unknown!r} in lm-eval{own}.{nearest(unknown, known)} `lm-eval ls tasks` lists them; pass "
        "--include-path DIR for task files of your own."
    )


def _unread(name: str, settings: TaskSettings, *, by_file_name: bool) -> list[str]:
    """The path of a file of your own that has a task, but that lm-eval left out; loading it tells why.

    Args:
        name: the name of the task.
        by_file_name: whether a file of that name that names no task is meant.
    """
    for file in (file for place in settings.include_path for file in sorted(Path(place).rglob("*.yaml"))):
        text = ""
        with suppress(OSError):  # of a file that may be another task's
            text = file.read_text(encoding="utf-8", errors="replace")
        named = [one.strip() for one in _NAMED.findall(text)]
        if name in named or (by_file_name and not named and name == file.stem):
            return [str(file)]
    return []


def evaluate_tasks(settings: TaskSettings, model: Any, **arguments: Any) -> dict[str, TaskResult]:
    """Evaluate a model with lm-eval's `hf` model; the results by task.

    The numbers are those of `lm_eval --model hf` with the same arguments. Seeds Python's, numpy's and torch's random
    generators.

    Args:
        settings: the tasks.
        model: a directory of `transformers`, or an open model, which is set to evaluation mode.
        arguments: further arguments of lm-eval's `HFLM`, such as `tokenizer`, `gguf_file`, `peft` and `device`.

    Raises:
        ConfigError: for tasks that cannot be loaded.
        OnstepError: if the evaluation fails, with lm-eval's reason.
    """
    lm_eval = import_lm_eval()
    # git prints an error outside of a repository, pip and 30 other programs take seconds, and nothing here reads them
    without_git = replaced(lm_eval.evaluator, "get_git_commit_hash", lambda: None)
    without_programs = replaced(lm_eval.evaluator, "add_env_info", _note_version)
    with _quiet(), without_git, without_programs, no_foreign_code(lm_eval, is_trusted=settings.trust_task_code):
        manager, tasks = load_tasks(settings)
        if "tokenizer" in arguments and not isinstance(arguments["tokenizer"], str):
            arguments["tokenizer"] = copy.deepcopy(arguments["tokenizer"])  # it is given a padding token
        try:
            harness = lm_eval.models.huggingface.HFLM(model, batch_size=settings.batch_size, **arguments)
            results = lm_eval.simple_evaluate(
                harness,
                tasks=tasks,
                task_manager=manager,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                apply_chat_template=settings.apply_chat_template,
                log_samples=False,
            )
        except OnstepError:
            raise
        except Exception as error:  # models, tokenizers and tasks are others' code
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise OnstepError(
                f"the tasks {', '.join(settings.tasks)} could not be evaluated ({type(error).__name__}: {reason}); "
                "check that the model has a tokenizer and is one that generates text."
            ) from error
    return results_of(results, settings.limit)


def _note_version(results: dict[str, Any]) -> None:
    results["lm_eval_version"] = version("lm_eval")


def results_of(results: Mapping[str, Any], limit: float | None = None) -> dict[str, TaskResult]:
    """The results by task of what lm-eval's `simple_evaluate` returns."""
    found = {}
    for name, values in results["results"].items():
        samples = results.get("n-samples", {}).get(name, {}).get("effective", values.get("sample_len"))
        found[name] = TaskResult(
            metrics=dict(_metrics(values)),
            num_samples=samples,
            num_fewshot=results.get("n-shot", {}).get(name),
            version=results.get("versions", {}).get(name),
            limit=limit,
            lm_eval=str(results.get("lm_eval_version", "")),
        )
    return {name: one for name, one in found.items() if one.metrics}


def _metrics(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Numbers by metric; one with a filter other than `none` has it in its name, after a comma as lm-eval writes it."""
    for key, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if "," in key and is_number:
            yield key.removesuffix(",none"), float(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out lm-eval's remarks on each task, and keep its errors."""
    loggers = [logging.getLogger(name) for name in _QUIET]
    levels = [one.level for one in loggers]
    try:
        for one in loggers:
            one.setLevel(logging.ERROR)
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)
