"""Which checkpoints there are, and which of them are as they were written."""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from onstep.checkpoint.foreign import describe_foreign
from onstep.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from onstep.checkpoint.transaction import SUPERSEDED
from onstep.checkpoint.verify_bar import verify_shown
from onstep.errors import CheckpointError

logger = logging.getLogger(__name__)

_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,18})")
_MOVED_ASIDE = re.compile(re.escape(SUPERSEDED) + r"checkpoint-(0|[1-9][0-9]{0,18})-[0-9a-f]{8}")


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that was found."""

    path: Path
    step: int
    manifest: Manifest


def checkpoints(root: Path) -> list[CheckpointInfo]:
    """All checkpoints in `root` with a valid manifest, newest step first; their files are not looked at.

    Raises:
        CheckpointError: when the folder cannot be listed; a missing one has no checkpoints.
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
    """The newest checkpoint whose every file is as its manifest says, or None.

    Args:
        root: the folder of the checkpoints; it may be missing.
        max_step: look at checkpoints up to this step only.
        report: told of each newer one that is refused, and why.

    Raises:
        CheckpointError: when the folder cannot be listed.
    """
    candidates = [found for found in _candidates(root) if max_step is None or found[0] <= max_step]
    for number, (step, path) in enumerate(candidates, start=1):
        try:
            return _verified(path, step)
        except CheckpointError as error:
            then = "falling back to the one before" if number < len(candidates) else "and there is none before it"
            report(f"Checkpoint {path.name} is refused, {then}: {error}")
    return None


def resolve(path: str | Path, step: int | None = None) -> CheckpointInfo:
    """The verified checkpoint that a user names: its own folder, or a folder of checkpoints, or a run's folder.

    Args:
        path: for a folder of checkpoints, the newest verified one is taken.
        step: take the checkpoint of this step and no other.

    Raises:
        CheckpointError: when there is none; a mistyped path is answered with the names nearby, the folder of another
            trainer with what can be done with it.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist{_nearby(path)}; give a checkpoint or a folder of checkpoints.")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder of a checkpoint or of checkpoints.")
    if os.path.lexists(path / MANIFEST):
        return _checkpoint_at(path, step)
    if not any(_candidates(path)):
        if (path / "checkpoints").is_dir():
            path = path / "checkpoints"
        elif (foreign := describe_foreign(path)) is not None:
            raise CheckpointError(foreign)
    return _newest_at(path) if step is None else _step_at(path, step)


def _checkpoint_at(path: Path, step: int | None) -> CheckpointInfo:
    manifest = verify_shown(path)
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{path} is a checkpoint of step {manifest.step}, not of step {step}.")
    return CheckpointInfo(path, manifest.step, manifest)


def _newest_at(root: Path) -> CheckpointInfo:
    refused: list[str] = []
    info = newest_verified(root, report=refused.append)
    if info is None:
        why = refused or [f"it has no folder checkpoint-<step>{_nearby(root / 'checkpoint-0')}"]
        raise CheckpointError(f"{root} holds no verified checkpoint: {_sentences(why)}")
    for line in refused:
        logger.warning(line)
    return info


def _step_at(root: Path, step: int) -> CheckpointInfo:
    paths = [path for found, path in _candidates(root) if found == step]
    if not paths:
        steps = ", ".join(str(info.step) for info in checkpoints(root)) or "none"
        raise CheckpointError(f"{root} holds no checkpoint of step {step}; it has those of steps: {steps}.")
    refused: list[str] = []
    for path in paths:
        try:
            return _verified(path, step)
        except CheckpointError as error:
            refused.append(f"Checkpoint {path.name} is refused: {error}")
    raise CheckpointError(_sentences(refused))


def _verified(path: Path, step: int) -> CheckpointInfo:
    if not os.path.lexists(path / MANIFEST) and (foreign := describe_foreign(path)) is not None:
        raise CheckpointError(foreign)
    _manifest_of_step(path, step)  # cheap, and before any file is hashed
    return CheckpointInfo(path, step, verify_shown(path))


def _manifest_of_step(path: Path, step: int) -> Manifest:
    manifest = read_manifest(path)
    if manifest.step != step:
        raise CheckpointError(f"{path} has the manifest of step {manifest.step}; the folder was renamed.")
    return manifest


def _candidates(root: Path) -> Iterator[tuple[int, Path]]:
    """Folders named like a checkpoint, newest step first; one moved aside comes after the one that took its place."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed ({error.strerror}); see to its permissions.") from error
    matches = [(_CHECKPOINT.fullmatch(name) or _MOVED_ASIDE.fullmatch(name), name) for name in names]
    found = [(int(match[1]), name) for match, name in matches if match is not None]
    for step, name in sorted(found, key=lambda item: (-item[0], item[1].startswith("."), item[1])):
        yield step, root / name


def _sentences(texts: list[str]) -> str:
    """The texts in one line, each with one full stop at its end."""
    return " ".join(f"{text.rstrip('.')}." for text in texts)


def _nearby(path: Path) -> str:
    """A hint of names like the last existing part of a path."""
    while not path.parent.is_dir():
        path = path.parent
    try:
        siblings = [name for name in os.listdir(path.parent) if not name.startswith(".")]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, siblings, n=3, cutoff=0.6)
    return f" (near it: {', '.join(str(path.parent / name) for name in near)})" if near else ""
