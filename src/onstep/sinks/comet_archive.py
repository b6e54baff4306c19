"""Comet's offline archives: the segment that a process writes, and what becomes of those that a kill left."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile

from onstep.forking import release_in_forked_children

MESSAGES = "messages.json"
META = "experiment.json"
"""Comet's own names of the two files in an archive."""


class Segment:
    """A folder for what this process records of the experiment `key`, as Comet will archive it.

    The description is there from the start, so that what is recorded is complete at any moment. The folder is locked
    as long as the process lives, or until `release`.
    """

    def __init__(self, folder: Path, key: str, project: str, workspace: str | None, now: float) -> None:
        self.path = folder / f"{key}-segment-{uuid.uuid4().hex[:8]}"
        self.path.mkdir()
        (self.path / META).write_text(json.dumps(_meta(key, project, workspace, int(now * 1000))), encoding="utf-8")
        self._lock: int | None = _lock(self.path)
        release_in_forked_children(self, Segment.release)

    def release(self) -> None:
        """Let another process archive what is there."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _meta(key: str, project: str, workspace: str | None, milliseconds: int) -> dict[str, Any]:
    return {
        "offline_id": key,
        "project_name": project,
        "workspace": workspace,
        "start_time": milliseconds,
        "stop_time": milliseconds,
        "tags": [],
        "resume_strategy": "get_or_create",
        "customer_error_reported": False,
        "customer_error_message": None,
        "user_provided_experiment_key": True,
        "comet_start_sourced": False,
    }


def _lock(segment: Path) -> int | None:
    """A locked descriptor of the segment's folder; None while another one holds it."""
    descriptor = os.open(segment, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def finish_segments(folder: Path, key: str) -> list[Path]:
    """Archive the segments of `key` that killed processes left, and remove the empty archives that go with them."""
    archives, are_all_done = [], True
    for segment in sorted(path for path in folder.glob(f"{key}-segment-*") if path.is_dir()):
        lock = _lock(segment)
        if lock is None:  # somebody records in it
            are_all_done = False
            continue
        try:
            archive = _finish(segment)
        finally:
            os.close(lock)
        archives += [] if archive is None else [archive]
    for archive in folder.glob(f"{key}-*.zip") if are_all_done else ():
        if _is_empty(archive):
            archive.unlink()
    return archives


def _finish(segment: Path) -> Path | None:
    messages = segment / MESSAGES
    if not messages.exists():
        shutil.rmtree(segment)
        return None
    content = messages.read_bytes()
    messages.write_bytes(content[: content.rfind(b"\n") + 1])  # the last line may be cut short
    archive = segment.with_suffix(".zip")
    partial = archive.with_suffix(".part")
    with ZipFile(partial, "w", ZIP_DEFLATED) as file:
        for each in sorted(segment.iterdir()):
            file.write(each, each.name)
    partial.replace(archive)
    shutil.rmtree(segment)
    return archive


def _is_empty(archive: Path) -> bool:
    try:
        with ZipFile(archive) as file:
            return not file.namelist()
    except BadZipFile:
        return False
