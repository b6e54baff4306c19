"""`onstep checkpoint verify`: every file against its hash."""

from __future__ import annotations

import re
from pathlib import Path

from tqdm import tqdm

from onstep.checkpoint import read_manifest
from onstep.checkpoint.inventory import damage, inventory, unlisted_files
from onstep.cli.checkpoint_paths import folder_of, locate
from onstep.cli.tables import counted, printable, size_shown
from onstep.errors import CheckpointError

_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")


def folders_to_verify(words: str, *, everything: bool) -> list[Path]:
    """The newest checkpoint, or the one that is named; with `everything` all beside it.

    Raises:
        CheckpointError: when there is none.
    """
    if not everything:
        return [folder_of(words)]
    root = locate(words).root
    folders = [entry.path for entry in inventory(root) if _CHECKPOINT.fullmatch(entry.path.name)]
    if not folders:
        raise CheckpointError(f"{root} has no checkpoints to verify; give a run, or a folder of checkpoints.")
    return folders


def is_intact(folder: Path) -> bool:
    """Hash a checkpoint, with a bar where there is a terminal, and print what is wrong with it."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        print(f"{folder}: BAD\n  {printable(str(error))}")
        return False
    with tqdm(
        total=manifest.size_bytes, desc=folder.name, unit="B", unit_scale=True, leave=False, disable=None, delay=0.5
    ) as bar:

        def show(count: int) -> None:
            bar.update(count)

        problems = damage(folder, show)
    files = counted(len(manifest.files), "file")
    if problems:
        print(f"{folder}: BAD, {len(problems)} of {files}" if len(problems) > 1 else f"{folder}: BAD")
    else:
        print(f"{folder}: good, {files}, {size_shown(manifest.size_bytes)}")
    for line in problems:
        print(f"  {printable(line)}")
    extra = unlisted_files(folder, manifest)
    if extra:
        print(f"  besides: {printable(', '.join(extra))}, not in the manifest, so never read")
    return not problems
