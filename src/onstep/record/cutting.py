"""Cuts files of records to what a run continues, and moves them out of the way; what is cut is kept beside them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path

from filelock import lock_descriptor

from onstep.files.durability import replace_durably
from onstep.files.json_values import encode
from onstep.record.decoding import Decoded
from onstep.record.forms import form_of
from onstep.record.names import free_name, rename_aside
from onstep.record.reading import MetricsLogError, Record, decoded_file, read_records


class MetricsLogHeldError(MetricsLogError):
    """The metrics log is open in another live writer."""


def align(path: str | Path, last_step: int | None = None, *, num_records: int | None = None) -> Path | None:
    """Truncate the metrics log at `path` to `last_step`, so that a run resumed from there can append to it.

    Returns the file with the removed records, or the renamed file, or None.

    Records with a `global_step` (default 0) beyond `last_step`, and those after the first `num_records`, are moved to
    ``<name>.branch-<n>.json``. A file that is not a metrics log, or a directory, is renamed to
    ``<name>.unreadable-<n>.json``, and so is a damaged file; with `num_records`, those of its records that precede the
    damage are kept in the metrics log. It is replaced atomically, or left untouched if nothing changes.

    Args:
        last_step: The last step to keep; None keeps all and only repairs damage from a crash.
        num_records: Maximum number of records to keep; None sets no limit.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogHeldError: if a live writer has the file open.
    """
    return align_to(path, up_to(last_step, num_records))[1]


def up_to(last_step: int | None = None, num_records: int | None = None) -> Callable[[list[Record], bool], list[Record]]:
    """What `align_to` keeps for `align`."""
    limit = math.inf if last_step is None else last_step

    def chosen(records: list[Record], is_damaged: bool) -> list[Record]:
        if is_damaged:
            return records[: num_records or 0]
        return [record for record in records[:num_records] if not _step_of(record) > limit]

    return chosen


def align_to(
    path: str | Path, chosen: Callable[[list[Record], bool], list[Record] | None]
) -> tuple[list[Record], Path | None]:
    """Truncate the metrics log at `path` as `align` does, to the records that `chosen` returns.

    Args:
        chosen: Passed the records, up to the first damage, and whether the file is damaged or not a metrics log;
            returns those to keep, or None to `set_aside` the file.

    Returns:
        The records kept, and the file with the removed ones, or the renamed file, or None.
    """
    path = Path(path)
    if path.is_dir():
        chosen([], True)
        return [], rename_aside(path, "unreadable-")
    with os.fdopen(locked(path)):
        decoded = decoded_file(path) if path.is_file() else Decoded(foreign="it is not a regular file")
        is_damaged = decoded.damage is not None or decoded.foreign is not None
        kept = chosen(decoded.records, is_damaged)
        if kept is None or is_damaged:
            aside = rename_aside(path, "" if kept is None else "unreadable-")
            if kept:
                _replace(path, kept)
            return kept or [], aside
        ids = set(map(id, kept))
        cut = [record for record in decoded.records if id(record) not in ids]
        if decoded.is_complete and not cut:
            return kept, None
        branch = write_branch(path, cut)
        _replace(path, kept)
        return kept, branch


def fork(path: str | Path, target: str | Path, *, num_records: int | None = None) -> None:
    """Start a metrics log at `target` with the first records of another run's at `path`, which is not modified.

    Args:
        path: The metrics log to copy from; it may be open in a live writer.
        target: The new metrics log; must not exist.
        num_records: Number of records to copy; None copies all.

    Raises:
        MetricsLogError: if `target` exists.
    """
    target = Path(target)
    if target.exists():
        raise MetricsLogError(f"{target} already exists; rename it first.")
    target.parent.mkdir(parents=True, exist_ok=True)
    _replace(target, read_records(path)[:num_records])


def set_aside(path: str | Path) -> Path:
    """Rename the metrics log at `path` to ``<name>.<n>.json`` with the first free number, and return the new path.

    A directory with that name becomes ``<name>.unreadable-<n>.json``.

    Raises:
        FileNotFoundError: if the file does not exist.
        MetricsLogHeldError: if a live writer has the file open.
    """
    path = Path(path)
    if path.is_dir():
        return rename_aside(path, "unreadable-")
    with os.fdopen(locked(path)):
        return rename_aside(path, "")


def write_branch(path: Path, records: list[Record]) -> Path | None:
    """Write records that are removed from a metrics log to a file beside it; None if there are none."""
    if not records:
        return None
    branch = free_name(path, "branch-")
    _replace(branch, records)
    return branch


def locked(path: Path, flags: int = 0) -> int:
    """Open a file of records and lock it against other writers; raises `MetricsLogHeldError` if one has it open."""
    descriptor = os.open(path, os.O_RDWR | flags, 0o666)
    try:
        is_free = lock_descriptor(descriptor, blocking=False)
    except OSError:
        is_free = True  # a file system without locks (some network mounts) cannot detect a second writer
    if not is_free:
        os.close(descriptor)
        raise MetricsLogHeldError(
            f"{path} is being written by another live run; use another directory for this run, or stop the other one."
        )
    return descriptor


def _step_of(record: Record) -> float:
    step = record.get("global_step")
    return step if isinstance(step, (int, float)) else 0


def _replace(path: Path, records: list[Record]) -> None:
    """Write a complete metrics log atomically."""
    replace_durably(path, form_of(path).content([encode(one).encode("ascii") for one in records]))
