"""What a run and its model are called, as the folders on the way to its log say."""

from __future__ import annotations

from pathlib import Path

_RUNS = "runs"


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
