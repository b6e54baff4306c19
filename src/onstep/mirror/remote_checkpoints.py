"""The checkpoints of a run in an object store: files under names that are used once, sealed by the manifest, put last.

The name has the step, the epoch of the owner who wrote it (`stores.lease`) and the beginning of the manifest's hash. So
no upload ever changes an object of another one, whatever is repeated, delayed or still under way.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3

from onstep.checkpoint import CheckpointInfo, FileStore, Manifest, Retention, to_delete, verify
from onstep.checkpoint.storage.manifest import MANIFEST, parse_manifest
from onstep.checkpoint.storage.store import TEMPORARY
from onstep.errors import CheckpointError, StoreError
from onstep.stores.bucket import Bucket, Listed
from onstep.stores.lease import LeaseState

logger = logging.getLogger(__name__)

DIRECTORY = "checkpoints"
ASIDE = "aside.json"
"""A manifest under this name is one of a branch that the run has abandoned."""
NAME = re.compile(rf"{DIRECTORY}/checkpoint-(?P<step>[0-9]+)-e(?P<epoch>[0-9]+)-(?P<seal>[0-9a-f]{{8}})/(?P<file>.+)")


@dataclass
class RemoteCheckpoint:
    """The objects of a checkpoint, or of what an upload has left."""

    name: str
    """Its directory, relative to the run's URL."""
    step: int
    epoch: int
    seal: str
    files: dict[str, Listed] = field(default_factory=dict)
    """By path relative to the directory."""

    @property
    def is_committed(self) -> bool:
        """Whether its manifest is there."""
        return MANIFEST in self.files


def seal_of(manifest: bytes) -> str:
    """What the name of a checkpoint has of its manifest."""
    return blake3(manifest).hexdigest()[:8]


def seals_of(infos: Iterable[CheckpointInfo]) -> set[tuple[int, str]]:
    """The steps of local checkpoints, with what their names in the store have of their manifests."""
    found = set()
    for info in infos:
        with suppress(FileNotFoundError):  # retention deletes it
            found.add((info.step, seal_of((info.path / MANIFEST).read_bytes())))
    return found


def name_of(step: int, epoch: int, seal: str) -> str:
    """The directory of a checkpoint, relative to the run's URL."""
    return f"{DIRECTORY}/checkpoint-{step}-e{epoch}-{seal}"


class RemoteCheckpoints:
    """The checkpoints below the URL of a run."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._manifests: dict[str, Manifest] = {}

    def all(self) -> list[RemoteCheckpoint]:
        """Every directory of a checkpoint, also of an interrupted upload; the newest step first."""
        found: dict[str, RemoteCheckpoint] = {}
        for one in self.bucket.list(DIRECTORY):
            match = NAME.fullmatch(one.name)
            if match is not None:
                name = one.name.removesuffix(f"/{match['file']}")
                entry = RemoteCheckpoint(name, int(match["step"]), int(match["epoch"]), match["seal"])
                found.setdefault(name, entry).files[match["file"]] = one
        return sorted(found.values(), key=lambda one: (one.step, one.epoch, one.name), reverse=True)

    def valid(self, lease: LeaseState | None) -> list[RemoteCheckpoint]:
        """The committed checkpoints that are part of the run, the newest first.

        Args:
            lease: the run's; None for a copy without one, of which all count.
        """
        committed = [one for one in self.all() if one.is_committed]
        return [one for one in committed if lease is None or lease.counts(one.name, one.epoch)]

    def manifest(self, one: RemoteCheckpoint) -> Manifest:
        """The manifest of a committed checkpoint.

        Raises:
            CheckpointError: if it is damaged.
            StoreError: if it cannot be read.
        """
        if one.name not in self._manifests:
            path = f"{one.name}/{MANIFEST}"
            found = self.bucket.get(path)
            if found is None:
                raise CheckpointError(f"{self.bucket.url}/{path} was deleted meanwhile.")
            self._manifests[one.name] = parse_manifest(found[0], f"{self.bucket.url}/{path}")
        return self._manifests[one.name]

    def infos(self, those: Iterable[RemoteCheckpoint]) -> list[CheckpointInfo]:
        """The same checkpoints as the rules of retention see them, with their names as paths; not damaged ones."""
        found = []
        for one in those:
            try:
                found.append(CheckpointInfo(Path(one.name), one.step, self.manifest(one)))
            except CheckpointError as error:
                logger.debug("not a checkpoint: %s", error)
        return found

    def upload(
        self,
        source: Path,
        name: str,
        upload_files: Callable[[Path, str, Sequence[str]], None],
        before: Callable[[], None],
    ) -> None:
        """Write a checkpoint, its manifest last; what is there already of an interrupted upload is not sent again.

        Args:
            source: its local directory, which nobody changes.
            name: see `name_of`.
            upload_files: uploads files of the directory to the name.
            before: called once all files are there, before the manifest.

        Raises:
            StoreError: if that fails; it may be tried again with the same name.
        """
        content = (source / MANIFEST).read_bytes()
        files = parse_manifest(content, str(source / MANIFEST)).files
        missing = self._missing(name, {path: digest.size for path, digest in files.items()})
        upload_files(source, name, missing)
        missing = self._missing(name, {path: digest.size for path, digest in files.items()})
        if missing:
            raise StoreError(f"{self.bucket.url}/{name} lacks {missing[0]} after its upload.")
        before()
        if self.bucket.create(f"{name}/{MANIFEST}", content) is None:
            found = self.bucket.get(f"{name}/{MANIFEST}")
            if found is None or found[0] != content:
                raise StoreError(f"{self.bucket.url}/{name} has another manifest.")

    def _missing(self, name: str, sizes: dict[str, int]) -> list[str]:
        there = {one.name.removeprefix(f"{name}/"): one.size for one in self.bucket.list(name)}
        return [path for path, size in sizes.items() if there.get(path) != size]

    def fetch(self, one: RemoteCheckpoint, root: Path) -> Path:
        """Download a committed checkpoint and verify it; its local directory, `root/checkpoint-<step>`.

        Args:
            one: the checkpoint.
            root: the directory of the local checkpoints, without one of this step.

        Raises:
            CheckpointError: if a file is missing or damaged.
            StoreError: if it cannot be read.
        """
        store, target = FileStore(), root / f"checkpoint-{one.step}"
        temporary = root / f"{TEMPORARY}checkpoint-{one.step}-{secrets.token_hex(4)}"
        listed = {*self.manifest(one).files, MANIFEST}
        objects = [Listed(path, each.size) for path, each in one.files.items() if path in listed]
        root.mkdir(parents=True, exist_ok=True)
        try:
            Bucket(f"{self.bucket.url}/{one.name}").download(objects, temporary)
            verify(temporary)
            store.rename(temporary, target)
            store.sync_dir(root)
        finally:
            store.remove_tree(temporary)
        return target

    def set_aside(self, those: Iterable[RemoteCheckpoint]) -> None:
        """Let checkpoints of an abandoned branch no longer count: their manifests get another name."""
        for one in those:
            found = self.bucket.get(f"{one.name}/{MANIFEST}")
            if found is not None:
                self.bucket.put(f"{one.name}/{ASIDE}", found[0])
                self.bucket.delete([f"{one.name}/{MANIFEST}"])

    def delete(self, those: Iterable[RemoteCheckpoint]) -> None:
        """Delete checkpoints: of each, the manifest first."""
        for one in those:
            first = [name for name in (MANIFEST, ASIDE) if name in one.files]
            self.bucket.delete(f"{one.name}/{name}" for name in first)
            self.bucket.delete(f"{one.name}/{path}" for path in one.files if path not in first)

    def surplus(
        self, those: Sequence[RemoteCheckpoint], retention: Retention, local: Collection[tuple[int, str]]
    ) -> list[RemoteCheckpoint]:
        """Those that no rule of retention keeps, and that are not among the local ones, by step and seal."""
        deleted = {str(info.path) for info in to_delete(self.infos(those), retention)}
        return [one for one in those if one.name in deleted and (one.step, one.seal) not in local]
