"""Lists the checkpoint directories of a run with their states: complete, damaged, being saved, ..."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

from onstep.checkpoint.catalog.discovery import CheckpointInfo, _manifest_of_step, _match, named_dirs, verify_shown
from onstep.checkpoint.storage.manifest import MANIFEST, Manifest, Progress, check_file, read_manifest
from onstep.checkpoint.storage.store import TEMPORARY, TRASH
from onstep.checkpoint.storage.transaction import is_held
from onstep.errors import CheckpointError

MAX_ENTRIES = 100_000
"""How many files of a checkpoint are counted; those of Onstep are some per rank and component."""


class EntryState(StrEnum):
    """The state of a checkpoint directory."""

    COMPLETE = "complete"
    """Its manifest is valid, and every file exists with the listed size."""
    DAMAGED = "damaged"
    """It is named like a checkpoint but is not a valid one."""
    SUPERSEDED = "moved aside"
    """Complete, but moved aside for a newer save of its step; used if that save never completed."""
    SAVING = "being saved"
    """A live process is writing it."""
    UNFINISHED = "unfinished"
    """Left by a save that died; the next start removes it."""
    DELETING = "half deleted"
    """Left by a deletion that died; the next start removes it."""


USABLE = (EntryState.COMPLETE, EntryState.SUPERSEDED)


@dataclass(frozen=True)
class Entry:
    """One checkpoint directory."""

    path: Path
    step: int
    state: EntryState
    size_bytes: int
    """Total size of the files that exist."""
    manifest: Manifest | None = None
    """None without a valid manifest."""
    reason: str = ""
    """Why it is damaged."""

    @property
    def info(self) -> CheckpointInfo | None:
        """The entry as a `CheckpointInfo`; None unless it is usable."""
        if self.manifest is None or self.state not in USABLE:
            return None
        return CheckpointInfo(self.path, self.step, self.manifest)


def inventory(root: Path) -> list[Entry]:
    """All checkpoint directories in `root`, newest step first; empty if `root` is missing. Does not hash contents.

    Raises:
        CheckpointError: if the directory cannot be listed.
    """
    return [_entry(directory, step, kind) for step, kind, directory in named_dirs(root)]


def mark_resumable(entries: Iterable[Entry]) -> tuple[list[Entry], Entry | None]:
    """Verify the newest usable entry by hash, falling back as a resume does; entries that fail become damaged.

    Returns:
        The entries, in their order, and the one that a resume would use.
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


def damage(directory: Path, progress: Progress | None = None) -> list[str]:
    """Everything wrong with a checkpoint, file by file; empty if it passes verification."""
    match = _match(directory)
    try:
        manifest = read_manifest(directory) if match is None else _manifest_of_step(directory, int(match["step"]))
    except CheckpointError as error:
        return [str(error)]
    problems = []
    for name, digest in manifest.files.items():
        try:
            check_file(directory, name, digest, progress)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def unlisted_files(directory: Path, manifest: Manifest) -> list[str]:
    """Files in a checkpoint that its manifest does not list; nothing reads them. Looks at `MAX_ENTRIES` at most."""
    there = sorted(name for name, _ in islice(_files_below(directory), MAX_ENTRIES))
    return [name for name in there if name != MANIFEST and name not in manifest.files]


def _entry(path: Path, step: int, kind: str) -> Entry:
    size = _size(path)
    if kind == TEMPORARY:
        is_live = is_held(path.with_name(f"{path.name}.lock"))
        return Entry(path, step, EntryState.SAVING if is_live else EntryState.UNFINISHED, size)
    if kind.startswith(TRASH):
        return Entry(path, step, EntryState.DELETING, size)
    manifest = None
    try:
        manifest = _manifest_of_step(path, step)
        for name, digest in manifest.files.items():
            check_file(path, name, digest, hashed=False)
    except CheckpointError as error:
        return Entry(path, step, EntryState.DAMAGED, size, manifest, str(error))
    return Entry(path, step, EntryState.SUPERSEDED if kind else EntryState.COMPLETE, size, manifest)


def _size(directory: Path) -> int:
    """Total bytes of the files below a directory; a concurrent save may remove some in the meantime."""
    return sum(size for _, size in islice(_files_below(directory), MAX_ENTRIES))


def _files_below(directory: Path) -> Iterator[tuple[str, int]]:
    """Name relative to the directory and size of each file below it; does not follow links."""
    waiting = [""]
    while waiting:
        prefix = waiting.pop()
        try:
            with os.scandir(directory / prefix) as entries:
                for entry in entries:
                    name = f"{prefix}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(f"{name}/")
                    else:
                        with suppress(FileNotFoundError):
                            yield name, entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue  # it was removed in the meantime, or cannot be read
