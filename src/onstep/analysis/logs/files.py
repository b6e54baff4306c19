"""Finds the logs of a project, in Onstep's layout and in that of a folder per model, and names them by their places."""

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


_RUNS = "runs"
_USUAL_FILES = ("trainer_logs", "trainer_state")
"""What logs are called in any run."""


def names_in_path(path: Path) -> tuple[str | None, str | None]:
    """The run's and the model's name, as the folders on the way to a log say them.

    Beside a `run.json` the folder is the run, and what is above ``runs`` is no model's folder.
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
    """What a log is called by that has no other name: its file's, or its folder's where every run has such a file.

    A checkpoint of Hugging Face's Trainer is named with the folder above it: ``<folder>/checkpoint-500``.

    Args:
        path: The log.
        num_above: How many more folders the name begins with.
    """
    parts = path.absolute().with_suffix("").parts[1:]
    if len(parts) > 1 and parts[-1] in _USUAL_FILES:
        parts = parts[:-1]
    num = 2 if parts[-1].startswith("checkpoint-") else 1
    return "/".join(parts[-num - num_above :])
