"""Finds and verifies the checkpoints in a directory."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from onstep.checkpoint.catalog.foreign import describe_foreign
from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, read_manifest, verify
from onstep.checkpoint.storage.transaction import SUPERSEDED
from onstep.errors import CheckpointError

logger = logging.getLogger(__name__)

BAR_BYTES = 1024**3
"""Checkpoints smaller than this are verified too quickly for a progress bar to be useful."""


def verify_shown(directory: Path, bar_bytes: int = BAR_BYTES) -> Manifest:
    """`verify` with a progress bar if the checkpoint has at least `bar_bytes`; call it on one rank.

    Raises:
        CheckpointError: naming the first file that is missing or not as it was written.
    """
    total = read_manifest(directory).size_bytes
    label = f"verifying {directory.name}"
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=total < bar_bytes) as bar:
        return verify(directory, progress=bar.update)


_RESTORE = "Put back the files that were saved, or use another checkpoint."
ASIDE = "aside"
"""Subdirectory for checkpoints of branches that the run has abandoned: `aside/branch-<n>/`."""
_NAME = re.compile(
    r"(?P<kind>|\.tmp-|\.superseded-|\.trash-(?:.*-)?)checkpoint-(?P<step>0|[1-9][0-9]{0,18})(?P<unique>(?:-[0-9a-f]{8})*)"
)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that was found."""

    path: Path
    """The directory of the checkpoint."""
    step: int
    """The step (optimizer updates) that the checkpoint is of."""
    manifest: Manifest
    """Its manifest."""
    in_memory: bool = False
    """Whether it is in the memory of the node, not in the directory of its run."""


def checkpoints(root: Path) -> list[CheckpointInfo]:
    """All checkpoints in `root` with a valid manifest, newest step first; does not check their files.

    Raises:
        CheckpointError: if the directory cannot be listed; a missing one has no checkpoints.
    """
    found: dict[int, CheckpointInfo] = {}
    for step, path in _candidates(root):
        try:
            manifest = _manifest_of_step(path, step)
        except CheckpointError as error:
            logger.debug("Not a checkpoint: %s", error)
        else:
            found.setdefault(step, CheckpointInfo(path, step, manifest))
    return list(found.values())


def newest_verified(
    root: Path, max_step: int | None = None, report: Callable[[str], None] = logger.warning
) -> CheckpointInfo | None:
    """The newest checkpoint whose files all match its manifest, or None.

    Args:
        root: the directory of the checkpoints; it may be missing.
        max_step: only consider checkpoints up to this step; None for all.
        report: called with a message for each newer checkpoint that is rejected.

    Raises:
        CheckpointError: if the directory cannot be listed.
    """
    candidates = [found for found in _candidates(root) if max_step is None or found[0] <= max_step]
    for number, (step, path) in enumerate(candidates, start=1):
        try:
            return _verified(path, step)
        except CheckpointError as error:
            then = "falling back to the previous one" if number < len(candidates) else "and no earlier one exists"
            report(f"Checkpoint {path.name} is rejected, {then}: {error}")
    return None


def resolve(path: str | Path, step: int | None = None) -> CheckpointInfo:
    """The verified checkpoint that a user names: its own directory, a directory of checkpoints, or a run directory.

    Args:
        path: for a directory of checkpoints, the newest verified one is used.
        step: accept only the checkpoint of this step; None accepts any.

    Raises:
        CheckpointError: if there is none. For a mistyped path the message suggests similar names; for a Hugging Face
            directory it explains how to use the weights.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{_nearby(path)}; give a checkpoint or a directory of checkpoints.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give a checkpoint directory or a directory of checkpoints.")
    if os.path.lexists(path / MANIFEST):
        try:
            manifest = verify_shown(path)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {_RESTORE}") from error
        if step is not None and manifest.step != step:
            raise CheckpointError(f"{path} is a checkpoint of step {manifest.step}, not of step {step}.")
        return CheckpointInfo(path, manifest.step, manifest)
    if not any(_candidates(path)):
        if (path / "checkpoints").is_dir():
            path = path / "checkpoints"
        elif (foreign := describe_foreign(path)) is not None:
            raise CheckpointError(foreign)
    return _newest_at(path) if step is None else _step_at(path, step)


def _newest_at(root: Path) -> CheckpointInfo:
    refused: list[str] = []
    info = newest_verified(root, report=refused.append)
    if info is None:
        why = refused or [f"it has no directory checkpoint-<step>{_nearby(root / 'checkpoint-0')}"]
        remedy = f" {_RESTORE}" if refused else ""
        raise CheckpointError(f"{root} holds no verified checkpoint: {_sentences(why)}{remedy}")
    for line in refused:
        logger.warning(line)
    return info


def _step_at(root: Path, step: int) -> CheckpointInfo:
    paths = [path for found, path in _candidates(root) if found == step]
    if not paths:
        steps = ", ".join(str(info.step) for info in checkpoints(root)) or "none"
        raise CheckpointError(f"{root} has no checkpoint of step {step}; available steps: {steps}.")
    refused: list[str] = []
    for path in paths:
        try:
            return _verified(path, step)
        except CheckpointError as error:
            refused.append(f"Checkpoint {path.name} is rejected: {error}")
    raise CheckpointError(f"{_sentences(refused)} {_RESTORE}")


def _verified(path: Path, step: int) -> CheckpointInfo:
    if not os.path.lexists(path / MANIFEST) and (foreign := describe_foreign(path)) is not None:
        raise CheckpointError(foreign)
    _manifest_of_step(path, step)  # cheap, and before any file is hashed
    return CheckpointInfo(path, step, verify_shown(path))


def _manifest_of_step(path: Path, step: int) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path} has the manifest of step {manifest.step}; the directory was renamed.")
    return manifest


def _candidates(root: Path) -> list[tuple[int, Path]]:
    """Directories named like a checkpoint, newest step first; a superseded one comes after its replacement."""
    return [(step, directory) for step, kind, directory in named_dirs(root) if kind in ("", SUPERSEDED)]


def named_dirs(root: Path) -> list[tuple[int, str, Path]]:
    """Directories in `root` named by Onstep, newest first, each with its step and the prefix that tells its kind.

    Raises:
        CheckpointError: if `root` cannot be listed; a missing one has none.
    """
    matches = [(_match(directory), directory) for directory in _dirs_in(root)]
    found = [(int(match["step"]), match["kind"], directory) for match, directory in matches if match is not None]
    return sorted(found, key=lambda each: (-each[0], each[1] != "", each[2].name))


def _dirs_in(root: Path) -> list[Path]:
    try:
        with os.scandir(root) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"cannot list {root}: {error.strerror}; check its permissions.") from error


def _sentences(texts: list[str]) -> str:
    """The texts on one line, each ending in a single period."""
    return " ".join(f"{text.rstrip('.')}." for text in texts)


def _nearby(path: Path) -> str:
    """A hint listing existing names similar to the first missing part of a path."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        siblings = [name for name in os.listdir(path.parent) if not name.startswith(".")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    return f" (near it: {', '.join(str(path.parent / name) for name in near)})" if near else ""


def left_branches(root: Path) -> dict[str, list[int]]:
    """Steps of the checkpoints of abandoned branches, by the branch's directory relative to `root`."""
    branches = {
        f"{ASIDE}/{branch.name}": sorted(step for step, _, _ in named_dirs(branch)) for branch in _dirs_in(root / ASIDE)
    }
    return {name: steps for name, steps in sorted(branches.items()) if steps}


def _match(path: Path) -> re.Match[str] | None:
    """The parsed name if Onstep made it: every kind except a checkpoint itself has a unique suffix."""
    match = _NAME.fullmatch(path.name)
    return match if match is not None and bool(match["kind"]) == bool(match["unique"]) else None
