"""What a run and its model are called, as the folders on the way to its log say."""

from __future__ import annotations

from pathlib import Path

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
