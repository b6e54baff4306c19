"""Resolves `PATH`, `PATH@STEP` and `PATH@best` on the command line to a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onstep.analysis.logs.run_status import run_record
from onstep.checkpoint import CheckpointInfo, Retention, checkpoints, resolve, verify
from onstep.checkpoint.catalog.inventory import inventory
from onstep.checkpoint.catalog.retention import best_verified
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.cli.runs import find_named, names_beside, not_found
from onstep.errors import CheckpointError
from onstep.mirror.copies import local_words

BEST = "best"
_CHOSEN = re.compile(r"(?P<path>.+)@(?P<choice>[0-9]+|best)")
CHECKPOINT_NAME = re.compile(r"checkpoint-[0-9]+")


@dataclass(frozen=True)
class Location:
    """A directory of checkpoints, or a single checkpoint."""

    root: Path
    checkpoint: Path | None = None
    """The named directory if it is itself a checkpoint, possibly damaged."""
    choice: str | None = None
    """The text after the `@`: a step, or `best`."""


def locate(words: str) -> Location:
    """Locate `PATH`, `PATH@STEP` or `PATH@best`: a checkpoint, a directory of checkpoints, or a run.

    Of a run in an object store, the checkpoint is fetched.

    A name that is not an existing path is looked up below `runs/`.

    Raises:
        CheckpointError: when nothing has that name; the message suggests similar names.
    """
    words = local_words(words)
    match = None if Path(words).exists() else _CHOSEN.fullmatch(words)
    path, choice = (words, None) if match is None else (match["path"], match["choice"])
    directory = _existing(path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is a file; name a checkpoint, a directory of checkpoints, or a run.")
    if (directory / MANIFEST).exists() or CHECKPOINT_NAME.fullmatch(directory.resolve().name):
        return Location(directory.parent, directory, choice)
    return Location(_root_of(directory), None, choice)


def find(words: str) -> CheckpointInfo:
    """The verified checkpoint that `words` names; the newest if there are several.

    Raises:
        CheckpointError: when there is none, or one of its files is damaged.
    """
    place = locate(words)
    step = int(place.choice) if place.choice not in (None, BEST) else None
    if place.checkpoint is not None:
        manifest = verify(place.checkpoint)
        if place.choice == BEST or step not in (None, manifest.step):
            raise CheckpointError(
                f"{place.checkpoint} is a single checkpoint, of step {manifest.step}; drop @{place.choice}."
            )
        return CheckpointInfo(place.checkpoint, manifest.step, manifest)
    if place.choice != BEST:
        return resolve(place.root, step)
    retention, refused = retention_of(checkpoints(place.root)), list[str]()
    info = best_verified(place.root, retention, refused.append)
    if info is None:
        why = "; ".join(refused) or f"no checkpoint there has a value for {retention.metric!r}"
        raise CheckpointError(f"{place.root} has no best checkpoint: {why}. Choose a step: {place.root}@STEP.")
    return info


def dir_of(words: str) -> Path:
    """The checkpoint directory that `words` names, whatever its state; the one of the newest step if there are several.

    Raises:
        CheckpointError: when no checkpoint is found.
    """
    place = locate(words)
    if place.checkpoint is not None:
        return place.checkpoint
    if place.choice == BEST:
        return find(words).path
    named = [entry for entry in inventory(place.root) if CHECKPOINT_NAME.fullmatch(entry.path.name)]
    wanted = [entry for entry in named if place.choice is None or entry.step == int(place.choice)]
    if not wanted:
        steps = ", ".join(str(entry.step) for entry in named) or "none"
        what = "checkpoint" if place.choice is None else f"checkpoint of step {place.choice}"
        raise CheckpointError(f"{place.root} has no {what}; it has checkpoints of steps: {steps}.")
    return wanted[0].path


def retention_of(infos: list[CheckpointInfo]) -> Retention:
    """The metric by which the run ranks its checkpoints, read from the newest one."""
    stored = infos[0].manifest.config_section("validation") if infos else {}
    metric, greater = stored.get("metric_for_best_model"), stored.get("greater_is_better")
    return Retention(
        metric=metric if isinstance(metric, str) and metric else "loss",
        greater_is_better=greater if isinstance(greater, bool) else None,
    )


def _existing(path: str) -> Path:
    found = find_named(path)
    if found is not None:
        return found
    raise CheckpointError(f"{path} does not exist.{not_found(path, names_beside(path), '')}")


def _root_of(directory: Path) -> Path:
    """The directory of a run's checkpoints: the given one if it contains any, or if no other is known."""
    if inventory(directory):
        return directory
    if (directory / "checkpoints").is_dir():
        return directory / "checkpoints"
    try:
        save = run_record(directory)["config"]["checkpoint"]["save"]
    except (KeyError, TypeError):
        return directory
    return Path(save) if isinstance(save, str) and Path(save).is_dir() else directory
