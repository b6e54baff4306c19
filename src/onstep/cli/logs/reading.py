"""Which logs the words of a command line name, and where what is made of them goes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from onstep.analysis.logs.files import FILE_NAME, FOREIGN_FILE_NAME, find_foreign_log, find_log_files
from onstep.analysis.logs.training_log import TrainingLog, distinct_labels
from onstep.errors import ConfigError


def find_log(words: str | None) -> Path:
    """The log that a path or a name stands for.

    A file is the log itself; a run's folder holds it; of a folder of runs, and without words, it is the newest one; a
    name that is no path here is looked for below `runs/`. A checkpoint of Hugging Face's Trainer, or the folder of its
    checkpoints, stands for the `trainer_state.json` of the newest.

    Raises:
        ConfigError: when there is none, with near names.
    """
    if words is None:
        return _newest(Path())
    path = Path(words)
    for candidate in (path, Path("runs") / path):
        if (candidate / FILE_NAME).is_file():
            return candidate / FILE_NAME
        if candidate.is_file():
            return candidate
    if path.is_dir():
        if not find_log_files(path) and (foreign := find_foreign_log(path)) is not None:
            return foreign
        return _newest(path)
    from onstep.config.part import nearest  # costs more than reading a short log

    known = sorted(log.parent.name for log in find_log_files(Path()))
    there = f" Here are logs of {', '.join(known[:10])}." if known else " Here are no logs of runs."
    raise ConfigError(f"there is no log {words!r}.{nearest(path.name, known)}{there}")


def _newest(folder: Path) -> Path:
    logs = find_log_files(folder)
    if not logs:
        raise ConfigError(
            f"no logs found in {folder.absolute()}: runs have theirs in runs/<run>/{FILE_NAME} or "
            f"output_models/<model>/runs/<run>/{FILE_NAME}, and Hugging Face's Trainer has it in "
            f"checkpoint-<step>/{FOREIGN_FILE_NAME}; give the path of a log or a run."
        )
    return logs[0]


OUTPUT_FOLDER = Path("tmp")
"""Where a picture goes when nobody says where."""
FORMATS = ("png", "svg", "pdf")


def read_logs(words: Sequence[str], labels: Sequence[str] = (), *, expand: bool = False) -> list[TrainingLog]:
    """The logs that the words name, in their order; without words the newest of the project.

    Args:
        words: Each as `find_log` takes it.
        labels: What to call the runs; none leaves them their own names.
        expand: Whether a folder of runs stands for all of them, by name, and not for the newest; which that is, is
            told on stderr.

    Raises:
        ConfigError: for a word that names nothing, and when there are not as many labels as logs.
        DataError: for a file that is no log.
    """
    paths = [path for word in words for path in _paths(word, expand=expand)] if words else [find_log(None)]
    paths = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]  # each once, where it came first
    logs = [TrainingLog.from_file(path) for path in paths]
    chosen = split_labels(labels, len(logs))
    if chosen and len(chosen) != len(logs):
        raise ConfigError(f"--labels must name each of the {len(logs)} runs, got {len(chosen)}: {', '.join(chosen)}.")
    for log, label in zip(logs, chosen, strict=False):
        log.label = label
    return logs


def split_labels(labels: Sequence[str], num_logs: int) -> list[str]:
    """`--labels a,b`, or a label for each log as in `--labels a --labels b`, where a comma is part of the label."""
    return [part.strip() for part in labels[0].split(",")] if len(labels) == 1 < num_logs else list(labels)


def output_path(output: Path | None, form: str | None, name: str, *, known: Sequence[str] = FORMATS) -> Path:
    """Where to write: `output`, or `name` in tmp/; the format is the one asked for, that of the suffix, or the first.

    A name without a suffix, or with a number behind its last dot, gets that of the format.

    Raises:
        ConfigError: for an unknown format or suffix, and for a format that is not the suffix's.
    """
    if form is not None and form not in known:
        raise ConfigError(f"--format must be one of {', '.join(known)}, got {form!r}.")
    if output is None:
        return OUTPUT_FOLDER / f"{name}.{form or known[0]}"
    suffix = output.suffix.lower().removeprefix(".")
    if suffix not in known:
        if suffix and not suffix[0].isdigit():
            endings = ", ".join(f".{one}" for one in known)
            raise ConfigError(f"--output must end in one of {endings}, got {str(output)!r}.")
        return output.with_name(f"{output.name}.{form or known[0]}")
    if form not in (None, suffix):
        raise ConfigError(f"--output {output} and --format {form} do not agree; leave one of them away.")
    return output


def file_prefix(logs: Sequence[TrainingLog]) -> str:
    """What the name of a file about these runs begins with."""
    label = distinct_labels(logs)[0] if len(logs) == 1 else "comparison"
    return f"{as_file_name(label)}_"


def as_file_name(text: str) -> str:
    """A text as part of a file's name."""
    return re.sub(r"[^\w.-]+", "_", text)[:80].strip("._") or "run"


def hand_over(path: Path, *, edit: bool = False, show: bool = False) -> None:
    """Print where a file was written, and open it as asked."""
    from onstep.analysis.plots.output import open_file

    print(path)
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if edit and editor:
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=False)
        except (OSError, ValueError) as error:
            print(f"The editor {editor!r} could not be started: {error}", file=sys.stderr)
    elif (edit or show) and not open_file(path):
        print("There is no screen, or no program, to open it with.", file=sys.stderr)


def _paths(word: str, *, expand: bool) -> list[Path]:
    folder = Path(word)
    if not folder.is_dir() or (folder / FILE_NAME).is_file():
        return [find_log(word)]
    found = find_log_files(folder)
    if expand:
        return sorted(found) or [find_log(word)]
    if len(found) > 1:
        print(f"{word} has {len(found)} runs; the newest is taken: {found[0].parent}", file=sys.stderr)
    return [find_log(word)]
