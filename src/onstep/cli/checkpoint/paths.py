"""Which checkpoint the words of a command line name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from onstep.analysis.logs.run_status import run_record
from onstep.checkpoint import CheckpointInfo, Retention, checkpoints, resolve, verify
from onstep.checkpoint.catalog.discovery import inventory
from onstep.checkpoint.catalog.retention import best_verified
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.config.part import nearest
from onstep.errors import CheckpointError

BEST = "best"
_CHOSEN = re.compile(r"(?P<path>.+)@(?P<choice>[0-9]+|best)")
CHECKPOINT_NAME = re.compile(r"checkpoint-[0-9]+")


@dataclass(frozen=True)
class Location:
    """A folder of checkpoints, or one of them."""

    root: Path
    checkpoint: Path | None = None
    """The folder that was named, where it is a checkpoint's own; it may be damaged."""
    choice: str | None = None
    """What stood behind the `@`: a step, or `best`."""


def locate(words: str) -> Location:
    """What `PATH`, `PATH@STEP` or `PATH@best` names: a checkpoint, a folder of checkpoints, or a run.

    A name that is no path here is looked for below `runs/`.

    Raises:
        CheckpointError: when there is nothing of that name, with names near it.
    """
    match = None if Path(words).exists() else _CHOSEN.fullmatch(words)
    path, choice = (words, None) if match is None else (match["path"], match["choice"])
    folder = _existing(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is a file; give a checkpoint, a folder of checkpoints, or a run.")
    if (folder / MANIFEST).exists() or CHECKPOINT_NAME.fullmatch(folder.resolve().name):
        return Location(folder.parent, folder, choice)
    return Location(_root_of(folder), None, choice)


def find(words: str) -> CheckpointInfo:
    """The verified checkpoint that the words name; of several the newest.

    Raises:
        CheckpointError: when there is none, or not every file of it is as it was written.
    """
    place = locate(words)
    step = int(place.choice) if place.choice not in (None, BEST) else None
    if place.checkpoint is not None:
        manifest = verify(place.checkpoint)
        if place.choice == BEST or step not in (None, manifest.step):
            raise CheckpointError(f"{place.checkpoint} is one checkpoint, of step {manifest.step}; leave @ away.")
        return CheckpointInfo(place.checkpoint, manifest.step, manifest)
    if place.choice != BEST:
        return resolve(place.root, step)
    judge, refused = retention_of(checkpoints(place.root)), list[str]()
    info = best_verified(place.root, judge, refused.append)
    if info is None:
        why = "; ".join(refused) or f"no checkpoint there has a value of {judge.metric!r}"
        raise CheckpointError(f"{place.root} has no best checkpoint: {why}. Choose a step: {place.root}@STEP.")
    return info


def folder_of(words: str) -> Path:
    """The one folder that the words name, whatever its state: of several that of the newest step.

    Raises:
        CheckpointError: when there is none.
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
        raise CheckpointError(f"{place.root} holds no {what}; it has those of steps: {steps}.")
    return wanted[0].path


def retention_of(infos: list[CheckpointInfo]) -> Retention:
    """By which metric the run judges its checkpoints, as the newest of them tells."""
    validation = infos[0].manifest.config.get("validation") if infos else None
    stored = validation if isinstance(validation, dict) else {}
    metric, greater = stored.get("metric_for_best_model"), stored.get("greater_is_better")
    return Retention(
        metric=metric if isinstance(metric, str) and metric else "loss",
        greater_is_better=greater if isinstance(greater, bool) else None,
    )


def _existing(path: str) -> Path:
    candidates = [Path(path)] + ([] if Path(path).is_absolute() else [Path("runs") / path])
    for folder in candidates:
        if folder.exists():
            return folder
    known = {
        sibling.name: sibling.parent
        for folder in reversed(candidates)
        if folder.parent.is_dir()
        for sibling in folder.parent.iterdir()
        if sibling.is_dir() and not sibling.name.startswith(".")
    }
    there = sorted(known)
    listed = f" There are: {', '.join(there[:10])}{', ...' if len(there) > 10 else ''}." if there else ""
    raise CheckpointError(f"{path} does not exist.{nearest(Path(path).name, there)}{listed}")


def _root_of(folder: Path) -> Path:
    """Where the checkpoints of a run's folder lie; the folder itself if it holds some, or nothing says otherwise."""
    if inventory(folder):
        return folder
    if (folder / "checkpoints").is_dir():
        return folder / "checkpoints"
    try:
        save = run_record(folder)["config"]["checkpoint"]["save"]
    except (KeyError, TypeError):
        return folder
    return Path(save) if isinstance(save, str) and Path(save).is_dir() else folder
