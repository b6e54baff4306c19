"""Resolves the runs and logs named on the command line, and the output path of what is made from them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from onstep.analysis.logs.files import FILE_NAME, FOREIGN_FILE_NAME, find_foreign_log, find_log_files, log_in
from onstep.analysis.logs.training_log import TrainingLog, distinct_labels
from onstep.cli.runs import find_named, not_found
from onstep.errors import ConfigError


def find_log(words: str | None) -> Path:
    """The log that a path or a name refers to.

    A file is the log itself; for a run's directory it is the log inside; for a directory of runs, or None, the newest
    log. A name that is not an existing path is looked up below `runs/`. A checkpoint of Hugging Face's Trainer, or the
    directory of its checkpoints, refers to the newest `trainer_state.json`.

    Raises:
        ConfigError: when there is none; the message suggests similar names.
    """
    if words is None:
        return _newest(Path())
    path = Path(words)
    found = find_named(words, lambda one: one.is_file() or log_in(one).is_file())
    if found is not None:
        return found if found.is_file() else log_in(found)
    if path.is_dir():
        if not find_log_files(path) and (foreign := find_foreign_log(path)) is not None:
            return foreign
        return _newest(path)
    known = [log.parent.name for log in find_log_files(Path())]
    raise ConfigError(f"there is no log {words!r}.{not_found(words, known, ' No run here has a log.')}")


def _newest(directory: Path) -> Path:
    logs = find_log_files(directory)
    if not logs:
        raise ConfigError(
            f"no logs found in {directory.absolute()}: runs write runs/<run>/{FILE_NAME} or "
            f"output_models/<model>/runs/<run>/{FILE_NAME}, and Hugging Face's Trainer writes "
            f"checkpoint-<step>/{FOREIGN_FILE_NAME}; pass the path of a log or a run."
        )
    return logs[0]


FORMATS = ("png", "svg", "pdf")


def read_logs(words: Sequence[str], labels: Sequence[str] = (), *, expand: bool = False) -> list[TrainingLog]:
    """Read the logs that `words` names, in that order; without words, the newest log of the project.

    Args:
        words: Paths or names, each as in `find_log`.
        labels: Labels for the runs; empty keeps the runs' own names.
        expand: Whether a directory of runs refers to all of them, sorted by name. Otherwise it refers to the newest,
            which is then named on stderr.

    Raises:
        ConfigError: for a name that is not found, and when the numbers of labels and logs differ.
        DataError: for a file that is not a log.
    """
    paths = [path for word in words for path in _paths(word, expand=expand)] if words else [find_log(None)]
    paths = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]  # drop duplicates, keep the first
    logs = [TrainingLog.from_file(path) for path in paths]
    chosen = split_labels(labels, len(logs))
    if chosen and len(chosen) != len(logs):
        raise ConfigError(
            f"--labels must name each of the {len(logs)} runs, got {len(chosen)} labels: {', '.join(chosen)}."
        )
    for log, label in zip(logs, chosen, strict=False):
        log.label = label
    return logs


def split_labels(labels: Sequence[str], num_logs: int) -> list[str]:
    """Split `--labels a,b`; with one `--labels` per log, a comma is part of the label."""
    return [part.strip() for part in labels[0].split(",")] if len(labels) == 1 < num_logs else list(labels)


def output_path(output: Path | None, form: str | None, name: str, *, known: Sequence[str] = FORMATS) -> Path:
    """The path to write to: `output`, or `name` in the current directory.

    The format is `form`, else that of the suffix, else the first.

    A name without a suffix, or with a digit after its last dot, gets the suffix of the format.

    Raises:
        ConfigError: for an unknown format or suffix, and for a format that contradicts the suffix.
    """
    if form is not None and form not in known:
        raise ConfigError(f"--format must be one of {', '.join(known)}, got {form!r}.")
    if output is None:
        return Path(f"{name}.{form or known[0]}")
    suffix = output.suffix.lower().removeprefix(".")
    if suffix not in known:
        if suffix and not suffix[0].isdigit():
            endings = ", ".join(f".{one}" for one in known)
            raise ConfigError(f"--output must end in one of {endings}, got {str(output)!r}.")
        return output.with_name(f"{output.name}.{form or known[0]}")
    if form not in (None, suffix):
        raise ConfigError(f"--output {output} and --format {form} conflict; drop one of them.")
    return output


def file_prefix(logs: Sequence[TrainingLog]) -> str:
    """Prefix of the names of files made from these runs."""
    label = distinct_labels(logs)[0] if len(logs) == 1 else "comparison"
    return f"{as_file_name(label)}_"


def as_file_name(text: str) -> str:
    """Make a text safe for a file name."""
    return re.sub(r"[^\w.-]+", "_", text)[:80].strip("._") or "run"


def hand_over(path: Path, *, edit: bool = False, show: bool = False) -> None:
    """Print the path of a written file, and open it if requested."""
    from onstep.analysis.plots.output import open_file

    print(path)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if edit and editor:
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=False)
        except (OSError, ValueError) as error:
            print(f"The editor {editor!r} could not be started: {error}", file=sys.stderr)
    elif (edit or show) and not open_file(path):
        print("It cannot be opened: no display, or no program for it.", file=sys.stderr)


def _paths(word: str, *, expand: bool) -> list[Path]:
    directory = Path(word)
    if not directory.is_dir() or (directory / FILE_NAME).is_file():
        return [find_log(word)]
    found = find_log_files(directory)
    if expand:
        return sorted(found) or [find_log(word)]
    if len(found) > 1:
        print(f"{word} has {len(found)} runs; using the newest: {found[0].parent}", file=sys.stderr)
    return [find_log(word)]
