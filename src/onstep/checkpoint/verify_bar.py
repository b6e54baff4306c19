"""Verifying a checkpoint under the eyes of somebody who waits for it."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from onstep.checkpoint.manifest import Manifest, read_manifest, verify

BAR_BYTES = 1024**3
"""A checkpoint of fewer bytes is verified before anybody would have read a bar."""


def verify_shown(folder: Path, bar_bytes: int = BAR_BYTES) -> Manifest:
    """`verify` with a progress bar, if the checkpoint has at least `bar_bytes`; for one rank.

    Raises:
        CheckpointError: naming the first file that is missing or not as it was written.
    """
    total = read_manifest(folder).size_bytes
    with tqdm(
        total=total, desc=f"verifying {folder.name}", unit="B", unit_scale=True, disable=total < bar_bytes
    ) as bar:

        def show(count: int) -> None:
            bar.update(count)

        return verify(folder, progress=show)
