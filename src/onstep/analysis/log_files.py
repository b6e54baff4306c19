"""Finds the logs of a project, in Onstep's layout and in that of a folder per model."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

FILE_NAME = "trainer_logs.json"
FOREIGN_FILE_NAME = "trainer_state.json"
"""What the Trainer of Hugging Face leaves in each checkpoint; it holds the records so far."""
_ANY = "*"


def find_log_files(project_dir: str | Path, model_name: str | None = None) -> list[Path]:
    """The logs of a project's runs, the newest first.

    Looked for: ``runs/<run>/``, ``<model>/runs/<run>/`` (the Trainer's output folders),
    ``output_models/<model>/runs/<run>/``, and the runs in `project_dir` itself where it is a folder of runs.

    Args:
        project_dir: Where to look; one that does not exist has no logs.
        model_name: Only the runs of this model.
    """
    return _newest_first(_found(Path(project_dir), FILE_NAME, model_name))


def find_foreign_log(folder: str | Path) -> Path | None:
    """The `trainer_state.json` of a folder, else of the checkpoint of the highest step in it; None where is none."""
    here = Path(folder) / FOREIGN_FILE_NAME
    found = [here] if here.is_file() else [*Path(folder).glob(f"checkpoint-*/{FOREIGN_FILE_NAME}")]
    return max(found, key=_step_of, default=None)


def _step_of(path: Path) -> int:
    step = path.parent.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


def find_diagnostic_logs(project_dir: str | Path, *file_names: str) -> list[Path]:
    """The files of some names (``parameter_norms.json``, ``gradient_norms.json``) in a project's runs.

    All in one list, the newest first, whichever name they have. Looked for where `find_log_files` looks.
    """
    return _newest_first(path for name in file_names for path in _found(Path(project_dir), name, None))


def _found(folder: Path, file_name: str, model_name: str | None) -> set[Path]:
    model = _ANY if model_name is None else glob.escape(model_name)
    patterns = [f"output_models/{model}/runs/*", f"{model}/runs/*"]
    if model_name is None:
        patterns += ["runs/*", "*"]
    name = glob.escape(file_name)
    return {path for pattern in patterns for path in folder.glob(f"{pattern}/{name}") if path.is_file()}


def _newest_first(paths: Iterable[Path]) -> list[Path]:
    """By the time they were last written; by name where that is the same."""
    return sorted(paths, key=lambda path: (-_modified(path), str(path)))


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was just removed or renamed
        return 0.0
