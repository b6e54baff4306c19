"""Attaches a run's local directory to its place in an object store: acquires the lease, fetches what is missing."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from onstep.checkpoint import Retention, best, checkpoints
from onstep.errors import CheckpointError, DataError, LostLeaseError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably
from onstep.mirror.mirror import Mirror, MirrorOptions
from onstep.mirror.remote_checkpoints import RemoteCheckpoint
from onstep.stores.bucket import Bucket
from onstep.stores.lease import Lease, LeaseState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Place:
    """Where a run is, and how it is mirrored."""

    url: str
    """Of the run."""
    directory: Path
    """Of the run on this machine; this process has locked it."""
    workplace: Path
    """For notes about the directory, beside it."""
    lease_seconds: float
    limit_bytes: float | None = None
    needs_best: bool = False
    """Whether the run will load its best checkpoint at its end."""


def attach(place: Place, retention: Retention, steps: Collection[int] = ()) -> Mirror:
    """Take a run's lease, and make the local directory what the run is; uploads begin with `Mirror.start`.

    A directory that this machine has mirrored last is ahead of the store, and stays as it is, unless it has no
    checkpoint and the store has. Any other one is moved aside, and what the store has is fetched: the run's files, its
    newest checkpoint, and those of the given steps.

    Args:
        place: of the run.
        retention: which checkpoints the store keeps.
        steps: of further checkpoints to fetch.

    Raises:
        RunExistsError: if a live process works on the run.
        CheckpointError: if none of its checkpoints can be read.
        StoreError: if the store cannot be reached or refuses.
    """
    bucket = Bucket(place.url)
    owners, owner = _owners(place.workplace), secrets.token_hex(8)
    _note(place.workplace, [*(owners[:1] or [""]), owner])
    who = f"process {os.getpid()} on {socket.gethostname()}"
    lease, before = Lease.take(
        Bucket(place.url),  # its own: what is uploaded can be given up while the lease is kept
        owner,
        who,
        seconds=place.lease_seconds,
        own=owners,
        report=lambda text: logger.warning("%s", text),
    )
    try:
        if was_last := _was_last(place, before, owners):
            _note(place.workplace, [owner])
        options = MirrorOptions(retention, place.workplace, place.limit_bytes, place.needs_best)
        mirror = Mirror(bucket, lease, place.directory, options)
        mirror.keep_lease()
        try:
            valid = mirror.remote.valid(lease.state)
            lease.settle(one.name for one in valid)
            if not was_last or (valid and not checkpoints(mirror.root)):
                _replace(place, mirror, valid, {*steps, *_best_step(mirror, valid, retention, place.needs_best)})
            mirror.files.look()
            _note(place.workplace, [owner])
        except BaseException:
            mirror.abandon()
            raise
    except BaseException:
        _give_back(lease)
        raise
    return mirror


def _was_last(place: Place, before: LeaseState | None, owners: list[str]) -> bool:
    """Whether this machine was the last to mirror the run, so that the store has nothing that it lacks."""
    return before is not None and [before.owner] == owners[:1] and (place.directory / "run.json").exists()


def _replace(place: Place, mirror: Mirror, valid: list[RemoteCheckpoint], steps: Collection[int]) -> None:
    if place.directory.exists():
        aside = _free(place.workplace / "replaced")
        place.directory.rename(aside)
        logger.warning(
            "%s is not what this machine has uploaded last, so it is fetched from %s; what was there is now in %s, and "
            "can be deleted",
            place.directory,
            place.url,
            aside,
        )
    if not mirror.files.remote():
        return
    logger.info("fetching the run from %s", place.url)
    mirror.files.fetch()
    for step in {*steps, None}:
        _fetch_newest(mirror, [one for one in valid if step in (None, one.step)], mirror.root)


def _best_step(mirror: Mirror, valid: list[RemoteCheckpoint], retention: Retention, needs_best: bool) -> Iterable[int]:
    found = best(mirror.remote.infos(valid), retention) if needs_best else None
    return () if found is None else (found.step,)


def _fetch_newest(mirror: Mirror, valid: list[RemoteCheckpoint], root: Path) -> None:
    """Fetch the first checkpoint that is as its manifest says."""
    refused = []
    for one in sorted(valid, key=lambda one: (one.step, one.epoch), reverse=True):
        if (root / f"checkpoint-{one.step}").exists():
            return
        try:
            mirror.remote.fetch(one, root)
            return
        except CheckpointError as error:
            logger.warning("%s The one before it is tried.", error)
            refused.append(error)
    if refused:
        raise refused[0]


def _free(path: Path) -> Path:
    """The first of `path`, `path-2`, ... that does not exist."""
    names = (path if number == 1 else path.with_name(f"{path.name}-{number}") for number in count(1))
    return next(one for one in names if not one.exists())


def _give_back(lease: Lease) -> None:
    try:
        lease.release()
    except (LostLeaseError, OSError) as error:
        logger.debug("the lease is not released: %s", error)


def _owners(workplace: Path) -> list[str]:
    """Names under which this machine has held the run, which have ended: whose the directory is, and who tried last."""
    try:
        content = read_json(workplace / "owners.json")
    except (OSError, DataError):
        return []
    return [one for one in content if isinstance(one, str)] if isinstance(content, list) else []


def _note(workplace: Path, owners: list[str]) -> None:
    workplace.mkdir(parents=True, exist_ok=True)
    replace_durably(workplace / "owners.json", json.dumps(owners))
