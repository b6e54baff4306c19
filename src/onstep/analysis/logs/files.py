"""Finds the logs of a project, in `runs/<run>` and in one directory per model, and names them by their paths."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from onstep.record.kinds import FILE_NAME as RECORD_NAME

FILE_NAME = "trainer_logs.json"
FOREIGN_FILE_NAME = "trainer_state.json"
"""The file with all records so far that Hugging Face's Trainer writes to each checkpoint."""
_ANY = "*"


def find_log_files(project_dir: str | Path, model_name: str | None = None) -> list[Path]:
    """The logs of a project's runs, newest first.

    Searches ``runs/<run>/``, ``<model>/runs/<run>/`` (the Trainer's output directories),
    ``output_models/<model>/runs/<run>/``, and the runs in `project_dir` itself if it is a directory of runs.

    Args:
        project_dir: The project; the result is empty if it does not exist.
        model_name: Only the runs of this model.
    """
    found = {name: _found(Path(project_dir), name, model_name) for name in (FILE_NAME, RECORD_NAME)}
    with_log = {path.parent for path in found[FILE_NAME]}
    return _newest_first(found[FILE_NAME] | {path for path in found[RECORD_NAME] if path.parent not in with_log})


def log_in(directory: Path) -> Path:
    """The log in a run's directory: its metrics log, or else the record; the former's path if there is neither."""
    path, record = directory / FILE_NAME, directory / RECORD_NAME
    return record if record.is_file() and not path.is_file() else path


def find_foreign_log(directory: str | Path) -> Path | None:
    """The `trainer_state.json` in a directory, or else in its checkpoint of the highest step; None if there is none."""
    here = Path(directory) / FOREIGN_FILE_NAME
    found = [here] if here.is_file() else [*Path(directory).glob(f"checkpoint-*/{FOREIGN_FILE_NAME}")]
    return max(found, key=_step_of, default=None)


def _step_of(path: Path) -> int:
    step = path.parent.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def find_diagnostic_logs(project_dir: str | Path, *file_names: str) -> list[Path]:
    """The files with the given names (``parameter_norms.json``, ``gradient_norms.json``) in a project's runs.

    Returns a single list, newest first. Searches the same places as `find_log_files`.

    Args:
        project_dir: the directory to search, with what is below it.
        file_names: the names of the files.
    """
    return _newest_first(path for name in file_names for path in _found(Path(project_dir), name, None))


def _found(directory: Path, file_name: str, model_name: str | None) -> set[Path]:
    model = _ANY if model_name is None else glob.escape(model_name)
    patterns = [f"output_models/{model}/runs/*", f"{model}/runs/*"]
    if model_name is None:
        patterns += ["runs/*", "*"]
    name = glob.escape(file_name)
    return {path for pattern in patterns for path in directory.glob(f"{pattern}/{name}") if path.is_file()}


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """Sort by time of last modification, then by name."""
    return sorted(paths, key=lambda path: (-_modified(path), str(path)))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was just removed or renamed
        return 0.0


_RUNS = "runs"
_USUAL_FILES = ("trainer_logs", "record", "trainer_state")
"""Log file names that do not identify a run."""


def names_in_path(path: Path) -> tuple[str | None, str | None]:
    """The names of run and model, derived from the path of a log.

    If there is a `run.json` next to the log, its directory is the run, and the directory above ``runs`` is not a model.
    """
    if (path.parent / "run.json").is_file():
        return path.absolute().parent.name, None
    if _RUNS not in path.parts:
        return None, None
    at = len(path.parts) - 1 - path.parts[::-1].index(_RUNS)
    run_name = path.parts[at + 1] if at + 1 < len(path.parts) else None
    has_model = at > 0 and path.parts[at - 1] != path.anchor
    return run_name, path.parts[at - 1] if has_model else None


def name_of_place(path: Path, num_above: int = 0) -> str:
    """Name a log by its path: by its file name, or by its directory if every run has a file with that name.

    A checkpoint of Hugging Face's Trainer includes the directory above it: ``<directory>/checkpoint-500``.

    Args:
        path: The log.
        num_above: Number of additional parent directories in the name.
    """
    parts = path.absolute().with_suffix("").parts[1:]
    if len(parts) > 1 and parts[-1] in _USUAL_FILES:
        parts = parts[:-1]
    num = 2 if parts[-1].startswith("checkpoint-") else 1
    return "/".join(parts[-num - num_above :])
