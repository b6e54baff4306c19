"""Mirrors the local directory of a run in an object store, in threads that training does not wait for."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from onstep.checkpoint import CheckpointInfo, FileStore, Retention, best, checkpoints
from onstep.checkpoint.catalog.discovery import named_dirs
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import CheckpointError, LostLeaseError, OnstepError, StoreError
from onstep.mirror.remote_checkpoints import ASIDE, DIRECTORY, RemoteCheckpoint, RemoteCheckpoints, name_of, seal_of
from onstep.mirror.run_files import RunFiles, has_flat_layout
from onstep.mirror.shared_uploads import SharedUploads
from onstep.stores.bucket import Bucket
from onstep.stores.lease import Lease

logger = logging.getLogger(__name__)

UPLOADING = "uploading"
"""Links to the files of the checkpoint that is uploaded, which retention may delete meanwhile."""
SHARED = "shared"
"""What is left to upload of it, for all ranks."""
LOOK_SECONDS = 0.5
"""Between two looks for a new checkpoint."""
PAUSES_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Between attempts while the store cannot be reached; the last one repeats."""
END_SECONDS = 600.0
"""How long the end of a run waits for a store that cannot be reached."""


@dataclass(frozen=True)
class MirrorOptions:
    """How a run is mirrored."""

    retention: Retention
    workplace: Path
    """A directory on the same disk as the run's, for links."""
    limit_bytes: float | None = None
    """Older local checkpoints are deleted beyond it, never the newest; None keeps what retention keeps."""
    needs_best: bool = False
    """Nor the best one."""


class Mirror:
    """Uploads what a run commits in its local directory, from `start` until `close`.

    The lease is renewed in a thread of its own. A store that cannot be reached costs warnings: what is due is uploaded
    when it can be reached again.

    Args:
        bucket: the run's URL.
        lease: held.
        directory: the run's local directory.
        options: further settings.
    """

    def __init__(self, bucket: Bucket, lease: Lease, directory: Path, options: MirrorOptions) -> None:
        self.bucket, self.lease, self.directory, self._options = bucket, lease, directory, options
        self.remote, self.files = RemoteCheckpoints(bucket), RunFiles(bucket, directory)
        self._shared = SharedUploads(options.workplace / SHARED)
        self.lost: str | None = None
        """Why nothing is uploaded any more: another process has taken over the run."""
        self._ended = threading.Event()
        self._failing: str | None = None
        self._done: object = None
        self._uploaded: set[int] = set()
        """Steps of local checkpoints that are in the store."""
        self.unfinished: str | None = None
        """What the end of the run has not brought into the store, and why."""
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()

    @property
    def root(self) -> Path:
        """The directory of the local checkpoints: that of the run, where it has Hugging Face's layout."""
        return self.directory if has_flat_layout(self.directory) else self.directory / DIRECTORY

    def keep_lease(self) -> None:
        """Begin to renew the lease."""
        self._work("lease", self._renew_until_end)

    def start(self) -> None:
        """Begin to look for what is to be uploaded."""
        self._work("upload", self._upload_until_end)
        self._work("trim", self._trim_until_end)

    def abandon(self) -> None:
        """End without an upload; the lease stays the caller's."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _work(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"onstep-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Upload what is left, as far as the store can be reached, and let the next process in."""
        if self._ended.is_set():
            return
        self._finish()
        self.unfinished = self.unfinished or self.lost
        self.abandon()
        try:
            if self.lost is None:
                self.lease.release()
        except StoreError as error:
            logger.warning("the lease of the run is not released, so that its next start waits: %s", error)

    def sync(self) -> None:
        """Make the store like the local directory, as retention wants it.

        Raises:
            LostLeaseError: if another process has taken over the run.
            StoreError: if the store cannot be reached.
        """
        with self._turn:
            if not (self.directory / "run.json").exists():
                return  # somebody has removed the directory, or a start that failed
            infos = checkpoints(self.root)
            local = {info.step: info.path for info in infos}
            self._set_aside_others(infos)
            for step in sorted(local, reverse=True):
                with _linked(local[step], self._options.workplace / UPLOADING) as source:
                    if source is not None:
                        self._upload(source, step)
            self.files.upload(self.lease.renew)
            self._delete_surplus()

    def _valid(self) -> list[RemoteCheckpoint]:
        return self.remote.valid(self.lease.state)

    def _set_aside_others(self, infos: Sequence[CheckpointInfo]) -> None:
        """Those of later steps, whose branch the run has left, and those of a run that was here before it."""
        if not infos:
            return
        newest, valid, here = max(infos, key=lambda info: info.step), self._valid(), _seals(infos)
        others = {str(one.path) for one in self.remote.infos(valid) if one.manifest.run_id != newest.manifest.run_id}
        abandoned = [one for one in valid if one.step > newest.step or one.name in others]
        abandoned = [one for one in abandoned if (one.step, one.seal) not in here]
        if abandoned:
            self.lease.renew()
            self.remote.set_aside(abandoned)

    def _upload(self, source: Path, step: int) -> None:
        seal = seal_of((source / MANIFEST).read_bytes())
        there = [one for one in self._valid() if one.step == step]
        self._uploaded.discard(step)  # which may be another checkpoint of the same step
        if any(one.seal == seal for one in there):
            self._uploaded.add(step)
            return
        name = name_of(step, self.lease.epoch, seal)
        self.remote.upload(source, name, lambda *given: self._shared.upload(self.bucket, *given), self._before_manifest)
        self._uploaded.add(step)
        self.remote.delete(there)

    def _before_manifest(self) -> None:
        """The files of the run first: no checkpoint may be ahead of the logs that belong to it."""
        self.files.upload(self.lease.renew)
        self.lease.renew()

    def _delete_surplus(self) -> None:
        everything, options = self.remote.all(), self._options
        committed = [one for one in everything if one.is_committed]
        valid = [one for one in committed if self.lease.state.counts(one.name, one.epoch)]
        surplus = self.remote.surplus(valid, options.retention, _seals(checkpoints(self.root)))
        left = [one for one in everything if not one.is_committed and ASIDE not in one.files]
        stray = [one for one in committed if one not in valid]
        if surplus or left or stray:
            self.lease.renew()
            self.remote.delete([*surplus, *left, *stray])

    def _trim_until_end(self) -> None:
        """Keep to the limit in a thread of its own, as requests to a store may hang for a minute."""
        while self._options.limit_bytes is not None and not self._ended.wait(LOOK_SECONDS):
            try:
                self._trim(self._options.limit_bytes)
            except CheckpointError as error:
                logger.debug("the directory cannot be read: %s", error)

    def _trim(self, limit: float) -> None:
        """Delete the oldest local checkpoints beyond the limit."""
        store = FileStore()
        infos = sorted(checkpoints(self.root), key=lambda info: info.step)
        sizes = sum(info.manifest.size_bytes for info in infos)
        found = best(infos, self._options.retention) if self._options.needs_best else None
        for info in infos[:-1]:
            if sizes <= limit:
                return
            if found is not None and info.step == found.step:
                continue
            try:
                store.remove_tree(info.path)
            except CheckpointError as error:
                logger.warning("%s", error)
            if info.step not in self._uploaded:
                logger.warning(
                    "checkpoint %d is deleted to keep to run.scratch_gib, and is not known to be in the store",
                    info.step,
                )
            sizes -= info.manifest.size_bytes

    def _state(self) -> object:
        """Another one once there is a checkpoint to upload, or one was moved aside."""
        try:
            return [(path.name, os.stat(path / MANIFEST).st_ino) for _, kind, path in named_dirs(self.root) if not kind]
        except (OSError, CheckpointError):
            return None

    def _upload_until_end(self) -> None:
        failures = 0
        while not self._ended.wait(LOOK_SECONDS if not failures else PAUSES_SECONDS[min(failures, 6) - 1]):
            state = self._state()
            if self.lost is not None or not state or (state == self._done and not failures):
                continue
            failures = 0 if self._try() else failures + 1
            if not failures:
                self._done = state

    def _try(self) -> bool:
        """Upload what is due; whether that worked."""
        try:
            self.sync()
        except LostLeaseError as error:
            self._lose(error)
        except (OnstepError, OSError) as error:
            if self._failing is None:
                logger.warning("%s The run continues; what is due is uploaded later.", error)
            self._failing = str(error)
        else:
            if self._failing is not None:
                logger.warning("%s can be reached again; everything that was due is uploaded", self.bucket.url)
            self._failing = None
        return self._failing is None

    def _finish(self) -> None:
        deadline, failures = time.monotonic() + END_SECONDS, 0
        while self.lost is None and not self._try() and self.lost is None:
            pause = PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)]
            if time.monotonic() + pause > deadline:
                self.unfinished = (
                    f"{self.bucket.url} could not be reached for {END_SECONDS:g} s at the end of the run; what is not "
                    f"there yet is in {self.directory}. The same command on this machine uploads it."
                )
                logger.error("%s", self.unfinished)
                return
            failures += 1
            time.sleep(pause)

    def _renew_until_end(self) -> None:
        while not self._ended.wait(self.lease.state.seconds / 4):
            try:
                self.lease.renew()
            except LostLeaseError as error:
                self._lose(error)
                return
            except StoreError as error:
                logger.debug("the lease could not be renewed: %s", error)

    def _lose(self, error: LostLeaseError) -> None:
        if self.lost is None:
            self.lost = str(error)
            logger.error("%s", error)


def _seals(infos: Iterable[CheckpointInfo]) -> set[tuple[int, str]]:
    """The steps of local checkpoints, with what their names in the store have of their manifests."""
    found = set()
    for info in infos:
        with suppress(FileNotFoundError):  # retention deletes it
            found.add((info.step, seal_of((info.path / MANIFEST).read_bytes())))
    return found


@contextmanager
def _linked(source: Path, place: Path) -> Iterator[Path | None]:
    """A directory with links to the files of a checkpoint, which stay readable; None if it is gone by now."""
    shutil.rmtree(place, ignore_errors=True)
    try:
        shutil.copytree(source, place, copy_function=_link)
    except (FileNotFoundError, shutil.Error):
        shutil.rmtree(place, ignore_errors=True)
        yield None
        return
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a disk without links
        shutil.copy2(source, target)
