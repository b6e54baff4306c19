"""Choosing among checkpoints, and keeping those of a branch that a run leaves."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from onstep.checkpoint.discovery import CheckpointInfo, checkpoints
from onstep.checkpoint.retention import Retention, best
from onstep.checkpoint.store import FileStore
from onstep.checkpoint.verify_bar import verify_shown
from onstep.errors import CheckpointError

ASIDE = "aside"
"""Folder, among the checkpoints, of those that belong to branches the run has left: `aside/branch-<n>/`."""
_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")


def best_verified(root: Path, retention: Retention, report: Callable[[str], None]) -> CheckpointInfo | None:
    """The checkpoint with the best metric whose every file is as it was written, or None.

    Args:
        root: the folder of the checkpoints.
        retention: names the metric and its direction.
        report: told of each better one that is refused, and why.

    Raises:
        CheckpointError: when the folder cannot be listed.
    """
    infos = checkpoints(root)
    while (info := best(infos, retention)) is not None:
        try:
            verify_shown(info.path)
        except CheckpointError as error:
            infos.remove(info)
            then = "falling back to the next best" if best(infos, retention) else "and no other has the metric"
            report(f"Checkpoint {info.path.name} is refused, {then}: {error}")
        else:
            return info
    return None


def set_aside(store: FileStore, root: Path, step: int) -> Path | None:
    """Move all checkpoints after `step`, damaged ones too, into a new folder of `aside`; gives it if there were any.

    The newest goes first: after a crash in between, what is left is the nearest to `step`.

    Raises:
        CheckpointError: when one cannot be moved.
    """
    newer = sorted((found for found in _steps(root) if found[0] > step), reverse=True)
    if not newer:
        return None
    branch = _new_branch(root / ASIDE)
    store.make_root(branch)
    for _, path in newer:
        store.rename(path, branch / path.name)
    store.sync_folder(branch)
    store.sync_folder(root)
    return branch


def _steps(root: Path) -> list[tuple[int, Path]]:
    try:
        with os.scandir(root) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed ({error.strerror}); see to its permissions.") from error
    return [(int(match[1]), folder) for folder in folders if (match := _CHECKPOINT.fullmatch(folder.name))]


def _new_branch(aside: Path) -> Path:
    number = 1
    while os.path.lexists(aside / f"branch-{number}"):
        number += 1
    return aside / f"branch-{number}"
