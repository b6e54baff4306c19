"""Finds what a command line names: a path, or the name of a run below `runs/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from onstep.config.suggestions import nearest
from onstep.stores.urls import check_place, is_url

RUNS = Path("runs")
"""Where runs are looked up by name."""


def find_named(words: str, is_meant: Callable[[Path], bool] = os.path.exists) -> Path | None:
    """The path `words`, else `runs/<words>`, whichever is the first that is meant; None if neither is.

    The URL of a run in an object store stands for a local copy of its logs and records.
    """
    if is_url(words):
        from onstep.mirror.copies import run_copy

        copy = run_copy(words)
        return copy if is_meant(copy) else next(filter(is_meant, sorted(copy.iterdir())), None)
    check_place("the run", words)
    path = Path(os.path.expanduser(words))
    return next((one for one in (path, RUNS / path) if is_meant(one)), None)


def not_found(words: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about a name that does not exist: the nearest one, and those that do."""
    names = sorted(set(known))
    there = f" Available: {', '.join(names[:10])}{', ...' if len(names) > 10 else ''}." if names else otherwise
    return f"{nearest(Path(words).name, names)}{there}"


def run_names(parent: Path = RUNS) -> list[str]:
    """The names of the runs in a directory."""
    return [record.parent.name for record in parent.glob("*/run.json")]


def names_beside(words: str) -> list[str]:
    """The names of the directories beside the path `words`, and beside `runs/<words>`."""
    names: list[str] = []
    for parent in {Path(words).parent, (RUNS / words).parent}:
        with suppress(OSError):  # it is not a directory, or cannot be listed
            names += [one.name for one in parent.iterdir() if one.is_dir() and not one.name.startswith(".")]
    return names


def checkpoint_steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints, the newest first."""
    names = (path.name for pattern in ("checkpoint-*", "*/checkpoint-*") for path in run.glob(pattern))
    return sorted({int(step) for name in names if (step := name.partition("-")[2]).isdigit()}, reverse=True)


def has_weights(directory: Path) -> bool:
    """Whether a run, a directory of checkpoints or a Hugging Face directory has weights to start from."""
    is_hf = any((directory / place / "config.json").is_file() for place in (".", "model"))
    return is_hf or bool(checkpoint_steps(directory)) or "checkpoint-" in directory.name


def near(path: Path) -> Path:
    """A path as it is typed here: relative to the working directory if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
