"""`onstep why`: explains the decisions of a run, and lists the features of the loop."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from onstep.analysis.logs.decisions_log import (
    EVERYDAY,
    FILE_NAME,
    Decision,
    by_whom,
    decision_lines,
    details_of,
    read_decisions,
)
from onstep.analysis.logs.run_status import rewind_command, run_record
from onstep.analysis.logs.task_results import evaluation_lines, evaluations_of_run
from onstep.analysis.text_tables import printable
from onstep.cli.cells import time_shown
from onstep.cli.completed_words import complete_words
from onstep.cli.runs import RUNS, find_named, not_found, run_names
from onstep.errors import ConfigError
from onstep.files.bounded_reading import open_regular_file
from onstep.stores.urls import with_urls

_ENDING = ("should_training_stop", "should_abort_without_save", "rerun_exit", "raised")
"""Flags that end a run."""
_FAILURE = re.compile(r"(?m)^first failure: (?P<line>.*)$")
_MOST_READ = 1 << 16
_STATUS = {
    "running": "is running, or was killed",
    "completed": "completed",
    "stopped": "was stopped",
    "paused": "exited before its end; the same command resumes it",
    "preempted": "was preempted; the same command resumes it",
    "failed": "failed",
}


def why(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_words,
            help="A run's directory, or its name below runs/. With --features, optional; it can also be the arguments "
            "of "
            "`onstep train`: [CONFIG.yaml] [KEY=VALUE ...].",
        ),
    ] = None,
    step: Annotated[int | None, typer.Option(help="Show only this step, including its logs and evaluations.")] = None,
    features: Annotated[
        bool, typer.Option("--features", help="List the loop's features in order, and which of them are on.")
    ] = False,
) -> None:
    """Explain why a run stopped, saved, skipped or rolled back: every decision, newest last.

    onstep why --features lists the optional features of the loop; with a run or a configuration, which are on.
    """
    words = words or []
    if features:
        if step is not None:
            raise typer.BadParameter("--step applies to a run's decisions; drop it, or drop --features.")
        print_features(words)
        return
    if len(words) != 1:
        raise typer.BadParameter(f"expected one run, got {' '.join(words) or 'none'}.", param_hint="RUN")
    directory = find_run(words[0])
    path = directory / FILE_NAME
    found = [
        headline(directory, read_decisions(path)),
        *allocation(directory),
        *explain(read_decisions(path), step),
        *failures(directory, step),
        *evaluated(directory, step),
    ]
    for line in found:
        print(printable(with_urls(line)))
    if step is not None and step > 0 and (command := rewind_command(directory, step)) is not None:
        print(printable(f"Its samples, gradients and layers: {command}"))


def print_features(words: list[str]) -> None:
    """Print the loop's features; with a run or the arguments of `onstep train`, also which of them are on."""
    from onstep.cli.config import configuration
    from onstep.cli.why_features import feature_lines
    from onstep.config import from_dict, resolve

    config = None
    if len(words) == 1 and "=" not in words[0] and not Path(words[0]).is_file():
        directory = find_run(words[0])
        stored = run_record(directory).get("config")
        if not isinstance(stored, dict):
            raise ConfigError(
                f"{directory} has no run.json with a configuration; pass the configuration as KEY=VALUE arguments."
            )
        config = from_dict(stored)
    elif words:
        config = resolve(configuration(words, None)[0])
    for line in feature_lines(config):
        print(line)


def find_run(run: str) -> Path:
    """The directory of a run, given as a path or as a name below `runs/`.

    Raises:
        ConfigError: when there is none; the message suggests a similar name.
    """
    found = find_named(run, lambda one: (one / "run.json").is_file() or (one / FILE_NAME).is_file())
    if found is not None:
        return found
    parent = RUNS if len(Path(run).parts) == 1 else Path(run).parent
    raise ConfigError(f"there is no run {run!r}.{not_found(run, run_names(parent), f' {parent} has no runs.')}")


def headline(directory: Path, decisions: Iterable[Decision]) -> str:
    """The status of the run and the decision that ended it."""
    content = run_record(directory)
    status = str(content.get("status", "unknown"))
    at = f" at step {content['step']}" if content.get("step") else ""
    line = f"{directory} {_STATUS.get(status, f'has the status {status}')}{at}."
    started = content.get("continued_at", content.get("started_at"))
    ending = deque((one for one in decisions if one.get("flag") in _ENDING and _is_since(one, started)), maxlen=1)
    if status in ("stopped", "preempted", "paused", "failed") and ending:
        line += f" The last decision to stop: {by_whom(ending[0]).removesuffix('.')}."
    error = content.get("error")
    return f"{line} {error}" if error else line


def allocation(directory: Path) -> list[str]:
    """The SLURM job in which the run was last started, its nodes, and how often it was requeued; [] without one."""
    content = run_record(directory)
    continued = content.get("continued_with")
    found = continued.get("slurm") if isinstance(continued, dict) else None
    found = content.get("slurm") if found is None else found
    if not isinstance(found, dict):
        return []
    count = found.get("restarts", 0)
    times = "never requeued" if count == 0 else f"requeued {'once' if count == 1 else f'{count} times'}"
    return [f"SLURM job {found.get('job')} on {found.get('nodes')}, {times}."]


def explain(decisions: Iterable[Decision], step: int | None = None) -> list[str]:
    """One entry per decision, for one step or all; logs and evaluations only for a given step."""
    if step is None:
        chosen = [one for one in decisions if one.get("flag") not in EVERYDAY]
    else:  # includes later decisions about it: the device reports a bad step with a delay
        chosen = [one for one in decisions if step in (one.get("step"), details_of(one).get("bad_step"))]
    if not chosen:
        return ["No decisions are recorded." if step is None else f"Nothing was decided at step {step}."]
    return [line for one in chosen for line in _lines(one)]


def failures(directory: Path, step: int | None = None) -> list[str]:
    """The failures of a rank after which the run was started again, of one step or all, oldest first.

    The one that has ended the run is in `headline`.
    """
    last, lines = str(run_record(directory).get("error")), []
    for path in sorted(directory.glob("first-culprit-*.txt")):
        try:
            with open_regular_file(path) as file:
                found = _FAILURE.search(file.read(_MOST_READ).decode(errors="replace"))
        except OSError:
            continue
        if found is None or found["line"] == last:
            continue
        at = re.search(r"at step (\d+)", found["line"])
        if step is None or (at is not None and int(at[1]) == step):
            day, _, clock = path.stem.removeprefix("first-culprit-").partition("T")
            when = f"{day} {clock.replace('-', ':')}"
            lines.append(f"step {'?' if at is None else at[1]}: the run failed: {found['line']} ({when})")
    return lines


def evaluated(directory: Path, step: int | None = None) -> list[str]:
    """What tasks found about the run's weights, of one step or all: one entry per evaluation, newest last."""
    lines = []
    for one in evaluations_of_run(directory):
        if step in (None, one.step):
            at = "step ?" if one.step is None else f"step {one.step}"
            what = "while it trained" if one.weights == "training" else f"of {one.weights}"
            lines.append(f"{at}: tasks evaluated {what} ({time_shown(one.timestamp) or 'no time'})")
            lines += [f"    {line}" for line in evaluation_lines(one.tasks)]
    return lines


def _is_since(decision: Decision, started: Any) -> bool:
    """Whether a decision was made after the run was last started; True if unknown."""
    timestamp = decision.get("timestamp")
    known = isinstance(timestamp, int | float) and isinstance(started, int | float)
    return not known or timestamp >= started


def _lines(decision: Decision) -> list[str]:
    first, *rest = decision_lines(decision)
    when = time_shown(decision.get("timestamp")) or "no time"
    return [f"step {decision.get('step', '?')}: {first} ({when})", *rest]
