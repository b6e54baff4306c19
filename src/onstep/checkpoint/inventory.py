"""All that lies in a folder of checkpoints: whole ones, damaged ones, and what saves and deletions have left."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from onstep.checkpoint.discovery import CheckpointInfo, verify_shown
from onstep.checkpoint.manifest import MANIFEST, Manifest, check_file, read_manifest
from onstep.checkpoint.retention import ASIDE
from onstep.checkpoint.store import TEMPORARY, TRASH
from onstep.checkpoint.transaction import is_held
from onstep.errors import CheckpointError

_NAME = re.compile(
    r"(?P<kind>|\.tmp-|\.superseded-|\.trash-(?:.*-)?)checkpoint-(?P<step>0|[1-9][0-9]{0,18})(?P<unique>(?:-[0-9a-f]{8})*)"
)


class EntryState(StrEnum):
    """What a folder is."""

    COMPLETE = "complete"
    """Its manifest is valid, and every file is there with its size."""
    DAMAGED = "damaged"
    """It has the name of a checkpoint, but is none."""
    SUPERSEDED = "moved aside"
    """Whole, and making way for a newer save of its step; used if that never came."""
    SAVING = "being saved"
    """A live process writes it."""
    UNFINISHED = "unfinished"
    """Left by a save that died; the next start removes it."""
    DELETING = "half deleted"
    """Left by a deletion that died; the next start removes it."""


USABLE = (EntryState.COMPLETE, EntryState.SUPERSEDED)


@dataclass(frozen=True)
class Entry:
    """One folder."""

    path: Path
    step: int
    state: EntryState
    size_bytes: int
    """Of the files that are there."""
    manifest: Manifest | None = None
    """None where there is no valid one."""
    reason: str = ""
    """Why it is damaged."""

    @property
    def info(self) -> CheckpointInfo | None:
        """As the rest of the package knows checkpoints; None unless it is usable."""
        if self.manifest is None or self.state not in USABLE:
            return None
        return CheckpointInfo(self.path, self.step, self.manifest)


def inventory(root: Path) -> list[Entry]:
    """What lies in `root`, newest step first; of a missing folder nothing. Contents are not hashed.

    Raises:
        CheckpointError: when the folder cannot be listed.
    """
    found = [_entry(root, path, match) for path in _folders(root) if (match := _match(path))]
    return sorted(found, key=lambda entry: (-entry.step, entry.path.name.startswith("."), entry.path.name))


def left_branches(root: Path) -> dict[str, list[int]]:
    """Steps of the checkpoints of branches that the run has left, by the branch's folder in `root`."""
    branches = {
        f"{ASIDE}/{branch.name}": sorted(int(match["step"]) for path in _folders(branch) if (match := _match(path)))
        for branch in _folders(root / ASIDE)
    }
    return {name: steps for name, steps in sorted(branches.items()) if steps}


def mark_resumable(entries: Iterable[Entry]) -> tuple[list[Entry], Entry | None]:
    """Hash the newest usable entry, falling back as a resume does; those that fail become damaged.

    Returns:
        The entries, in their order, and the one that a resume would take.
    """
    taken: Entry | None = None
    marked = []
    for entry in entries:
        if taken is None and entry.state in USABLE:
            try:
                verify_shown(entry.path)
            except CheckpointError as error:
                entry = replace(entry, state=EntryState.DAMAGED, reason=str(error))
            else:
                taken = entry
        marked.append(entry)
    return marked, taken


def damage(folder: Path, progress: Callable[[int], None] | None = None) -> list[str]:
    """What is wrong with a checkpoint, each file on its own; empty if it is verified.

    Args:
        folder: the checkpoint.
        progress: told the bytes read since it was told last.
    """
    try:
        manifest = _own_manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, digest in manifest.files.items():
        try:
            check_file(folder, name, digest, progress)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that its manifest does not list; nothing reads them."""
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return [name for name in there if name != MANIFEST and name not in manifest.files]


def _own_manifest(folder: Path) -> Manifest:
    """The manifest, if it is of the step in the folder's name."""
    manifest, match = read_manifest(folder), _match(folder)
    if match is not None and int(match["step"]) != manifest.step:
        raise CheckpointError(f"{folder} has the manifest of step {manifest.step}; the folder was renamed.")
    return manifest


def _entry(root: Path, path: Path, match: re.Match[str]) -> Entry:
    step, kind, size = int(match["step"]), match["kind"], _size(path)
    if kind == TEMPORARY:
        is_live = is_held(root / f"{path.name}.lock")
        return Entry(path, step, EntryState.SAVING if is_live else EntryState.UNFINISHED, size)
    if kind.startswith(TRASH):
        return Entry(path, step, EntryState.DELETING, size)
    try:
        manifest = _own_manifest(path)
    except CheckpointError as error:
        return Entry(path, step, EntryState.DAMAGED, size, None, str(error))
    try:
        for name, digest in manifest.files.items():
            check_file(path, name, digest, hashed=False)
    except CheckpointError as error:
        return Entry(path, step, EntryState.DAMAGED, size, manifest, str(error))
    return Entry(path, step, EntryState.SUPERSEDED if kind else EntryState.COMPLETE, size, manifest)


def _match(path: Path) -> re.Match[str] | None:
    """What the name says, if it is one of ours: all but a checkpoint itself end in something unique."""
    match = _NAME.fullmatch(path.name)
    return match if match is not None and bool(match["kind"]) == bool(match["unique"]) else None


def _folders(root: Path) -> Iterator[Path]:
    try:
        with os.scandir(root) as entries:
            folders = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CheckpointError(f"{root} cannot be listed ({error.strerror}); see to its permissions.") from error
    yield from folders


def _size(folder: Path) -> int:
    """Bytes of the files below a folder; a save in progress may take some away meanwhile."""
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_size
            except FileNotFoundError:
                continue
    return total
