"""Keeps the local checkpoints of a mirrored run within a limit, also while the store cannot be reached."""

from __future__ import annotations

import logging
from collections.abc import Container
from pathlib import Path

from onstep.checkpoint import CheckpointInfo, FileStore, Retention, best, checkpoints
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import CheckpointError

logger = logging.getLogger(__name__)


def bytes_of(info: CheckpointInfo) -> int:
    """The size of a local checkpoint, its manifest included."""
    try:
        return info.manifest.size_bytes + (info.path / MANIFEST).stat().st_size
    except OSError:  # it is gone by now
        return info.manifest.size_bytes


def trim(
    root: Path, limit_bytes: float, kept_best: Retention | None, uploaded: Container[int], held: tuple[int, int] | None
) -> None:
    """Delete the oldest local checkpoints so that one more of the newest's size fits into a limit; never the newest.

    Args:
        root: the directory of the checkpoints.
        limit_bytes: their size.
        kept_best: if the best checkpoint stays as well, how it is found.
        uploaded: steps of those that are in the store.
        held: the step and the size of one that is being uploaded, and whose files stay if it is deleted.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    store = FileStore()
    infos = sorted(checkpoints(root), key=lambda info: info.step)
    size = sum(bytes_of(info) for info in [*infos, *infos[-1:]])
    if held is not None and held[0] not in [info.step for info in infos]:
        size += held[1]
    found = None if kept_best is None else best(infos, kept_best)
    for info in infos[:-1]:
        if size <= limit_bytes:
            return
        if found is not None and info.step == found.step:
            continue
        freed = bytes_of(info)
        try:
            store.remove_tree(info.path)
        except CheckpointError as error:
            logger.warning("%s", error)
        if info.step not in uploaded:
            logger.warning(
                "checkpoint %d is deleted to keep to run.scratch_gib, and is not known to be in the store", info.step
            )
        if held is None or held[0] != info.step:
            size -= freed
