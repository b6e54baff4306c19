"""Finds run directories and logs below the paths that the user named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from onstep.analysis.logs.files import FILE_NAME, find_log_files, log_in, name_of_place
from onstep.errors import ConfigError

_RUN_FILES = ("run.json", FILE_NAME)
MOST_RUNS = 500
"""Runs that are listed, the newest."""


def check_paths(paths: Iterable[Path]) -> None:
    """Check that every path exists.

    Raises:
        ConfigError: naming the one that does not.
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"RUNS must be run directories, logs, or directories of runs, but {path} does not exist; "
                "pass one that does, or none for runs/."
            )


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The logs of all runs at or below the paths, newest first; a run that has not logged yet counts as well.

    Returns:
        Paths of logs, such as ``runs/NAME/trainer_logs.json``, which need not exist yet.
    """
    found: dict[Path, None] = {}
    for path in paths:
        for log in _logs_at(path):
            found.setdefault(log.absolute())
    return sorted(found, key=lambda log: (-_started(log), str(log)))[:MOST_RUNS]


def _logs_at(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if is_run(path):
        return [log_in(path)]
    below = [log_in(run.parent) for run in path.glob("*/run.json")]
    return [*below, *find_log_files(path)]


def is_run(directory: Path) -> bool:
    """Whether a directory is that of a run."""
    return any((directory / name).is_file() for name in _RUN_FILES)


def _started(log: Path) -> float:
    """When a run last began or continued, by the file that says so."""
    for path in (log.parent / "run.json", log):
        try:
            return path.stat().st_mtime
        except OSError:  # it is not there, or was just removed
            continue
    return 0.0


def id_of(log: Path, taken: Iterable[str]) -> str:
    """An id for the run of a log, after the name of its directory, that is not taken yet."""
    name = re.sub(r"[^A-Za-z0-9_-]+|\.(?=\.)", "-", name_of_place(log)).strip("-._")[:100] or "run"
    known = set(taken)
    numbered = (name if number == 1 else f"{name}-{number}" for number in range(1, len(known) + 2))
    return next(one for one in numbered if one not in known)
