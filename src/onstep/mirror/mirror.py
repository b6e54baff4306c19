"""Mirrors the local directory of a run in an object store, in threads that training does not wait for."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from onstep.checkpoint import CheckpointInfo, Retention, checkpoints
from onstep.checkpoint.catalog.discovery import named_dirs
from onstep.checkpoint.storage.manifest import MANIFEST
from onstep.errors import CheckpointError, LostLeaseError, OnstepError, StoreError
from onstep.mirror.beat import Beat
from onstep.mirror.linked_copy import linked
from onstep.mirror.local_space import bytes_of, trim
from onstep.mirror.outage import Outage
from onstep.mirror.remote_checkpoints import (
    ASIDE,
    DIRECTORY,
    RemoteCheckpoint,
    RemoteCheckpoints,
    name_of,
    seal_of,
    seals_of,
)
from onstep.mirror.run_files import RunFiles, has_flat_layout
from onstep.mirror.shared_uploads import SharedUploads
from onstep.stores.bucket import Bucket
from onstep.stores.lease import LEASE, Lease

logger = logging.getLogger(__name__)

UPLOADING = "uploading"
"""Links to the files of the checkpoint that is uploaded, which retention may delete meanwhile."""
SHARED = "shared"
"""What is left to upload of it, for all ranks."""
BEAT = "beat"
LOOK_SECONDS = 0.5
"""Between two looks for a new checkpoint."""
PAUSES_SECONDS = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Between attempts while the store cannot be reached; the last one repeats."""
SILENT_SECONDS = 40.0
"""After which requests without an answer count as an outage; they may fail much later."""
END_SECONDS = 600.0
"""How long the end of a run waits for a store that cannot be reached."""
LEAVING_SECONDS = 5.0
"""How long the threads of an upload that is given up are waited for."""


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
        bucket: the run's URL, for this mirror alone.
        lease: held.
        directory: the run's local directory.
        options: further settings.
    """

    def __init__(self, bucket: Bucket, lease: Lease, directory: Path, options: MirrorOptions) -> None:
        self.bucket, self.lease, self.directory, self._options = bucket, lease, directory, options
        self.remote, self.files = RemoteCheckpoints(bucket), RunFiles(bucket, directory)
        self._shared, self._beat = SharedUploads(options.workplace / SHARED), Beat(options.workplace / BEAT)
        self._outage = Outage(bucket.url, lambda: self.due)
        self.lost: str | None = None
        """Why nothing is uploaded any more: another process has taken over the run."""
        self.unfinished: str | None = None
        """What the end of the run has not brought into the store, and why."""
        self._ended, self._closed, self._given_up = threading.Event(), threading.Event(), threading.Event()
        self._is_closing = False
        self._done: object = None
        self._uploaded: set[int] = set()
        """Steps of local checkpoints that are in the store."""
        self._uploading: tuple[int, float] | None = None
        """The step of the checkpoint that is uploaded now, and when that began."""
        self._held: tuple[int, int] | None = None
        """The step and the size of the checkpoint that has links, whether it is in the store or not."""
        self._threads: list[threading.Thread] = []
        self._turn = threading.Lock()

    @property
    def root(self) -> Path:
        """The directory of the local checkpoints: that of the run, where it has Hugging Face's layout."""
        return self.directory if has_flat_layout(self.directory) else self.directory / DIRECTORY

    @property
    def due(self) -> str:
        """What is to be uploaded, in words."""
        try:
            infos = [info for info in checkpoints(self.root) if info.step not in self._uploaded]
        except CheckpointError:
            infos = []
        now = None if self._uploading is None else self._uploading[0]
        sizes = [self._shared.left_bytes if info.step == now else info.manifest.size_bytes for info in infos]
        steps = ", ".join(str(step) for step in sorted(info.step for info in infos))
        names = f"the checkpoints of steps {steps} and " if len(infos) > 1 else f"checkpoint {steps} and " * len(infos)
        return f"{names}files of the run, {(sum(sizes) + self.files.left_bytes) / 1e6:,.1f} MB"

    @property
    def seconds_to_upload(self) -> float:
        """How long it lasts until a checkpoint that is committed now is in the store, by the longest upload so far."""
        longest = self.lease.state.upload_seconds
        if self._uploading is None:
            return longest
        seconds = time.monotonic() - self._uploading[1]
        return max(longest, seconds) + max(longest - seconds, 0.0)

    def keep_lease(self) -> None:
        """Begin to renew the lease."""
        self._work("lease", self._renew_until_end)

    def start(self) -> None:
        """Begin to look for what is to be uploaded."""
        self._beat.write()
        self._work("upload", self._upload_until_end)
        self._work("watch", self._watch_until_end)

    def abandon(self) -> None:
        """End without an upload; the lease stays the caller's."""
        self._ended.set()
        for thread in self._threads:
            thread.join(timeout=LEAVING_SECONDS)
        self._beat.end()

    def _work(self, name: str, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"onstep-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        """Upload what is left, as far as the store can be reached, and let the next process in."""
        self.begin_to_close().wait()

    def begin_to_close(self) -> threading.Event:
        """Do what `close` does in a thread; the event is set once that is done."""
        if not self._is_closing and not self._ended.is_set():
            self._is_closing = True
            threading.Thread(target=self._close, name="onstep-last-upload", daemon=True).start()
        elif not self._is_closing:
            self._closed.set()
        return self._closed

    def leave(self) -> None:
        """Give up the last upload, and say in `unfinished` what is not there."""
        if not self._closed.is_set():
            self.unfinished = f"{self.bucket.url} lacks {self.due}; {self._remedy}"
            self._given_up.set()
            self.bucket.leave()
            if not self._closed.wait(LEAVING_SECONDS):  # requests hang
                self._ended.set()
                self._beat.end()

    @property
    def _remedy(self) -> str:
        return f"what is not there yet is in {self.directory}. The same command on this machine uploads it."

    def _close(self) -> None:
        self.unfinished = self.unfinished or f"the last upload to {self.bucket.url} has failed; {self._remedy}"
        try:
            if self._finish():
                self.unfinished = None
            elif self.lost is not None:
                self.unfinished = self.lost
            self.abandon()
            if self.lost is None:
                self.lease.release()
        except (StoreError, LostLeaseError) as error:
            logger.warning("the lease of the run is not released, so that its next start waits: %s", error)
        finally:
            self._closed.set()

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
            self._set_aside_others(infos)
            self._uploaded = {step for step, _ in seals_of(infos) & {(one.step, one.seal) for one in self._valid()}}
            for info in sorted(infos, key=lambda info: info.step, reverse=True):
                if info.step not in self._uploaded:
                    self._upload_links(info)
            self.files.upload(self.lease.renew)
            self._delete_surplus()

    def _valid(self) -> list[RemoteCheckpoint]:
        return self.remote.valid(self.lease.state)

    def _set_aside_others(self, infos: Sequence[CheckpointInfo]) -> None:
        """Those of later steps, whose branch the run has left, and those of a run that was here before it."""
        if not infos:
            return
        newest, valid, here = max(infos, key=lambda info: info.step), self._valid(), seals_of(infos)
        others = {str(one.path) for one in self.remote.infos(valid) if one.manifest.run_id != newest.manifest.run_id}
        abandoned = [one for one in valid if one.step > newest.step or one.name in others]
        abandoned = [one for one in abandoned if (one.step, one.seal) not in here]
        if abandoned:
            self.lease.renew()
            self.remote.set_aside(abandoned)

    def _upload_links(self, info: CheckpointInfo) -> None:
        self._held = info.step, bytes_of(info)
        try:
            with linked(info.path, self._options.workplace / UPLOADING) as source:
                if source is not None:
                    self._upload(source, info.step)
        finally:
            self._held = None

    def _upload(self, source: Path, step: int) -> None:
        seal = seal_of((source / MANIFEST).read_bytes())
        there = [one for one in self._valid() if one.step == step]
        if any(one.seal == seal for one in there):
            self._uploaded.add(step)
            return
        self._shared.expect(source)
        self._uploading = step, time.monotonic()
        try:
            name = name_of(step, self.lease.epoch, seal)
            self.remote.upload(
                source, name, lambda *given: self._shared.upload(self.bucket, *given), self._before_manifest
            )
        finally:
            self._uploading = None
        self._uploaded.add(step)
        self.remote.delete(there)

    def _before_manifest(self) -> None:
        """The files of the run first: no checkpoint may be ahead of the logs that belong to it."""
        self.files.upload(self.lease.renew)
        began = time.monotonic() if self._uploading is None else self._uploading[1]
        self.lease.renew(upload_seconds=max(self.lease.state.upload_seconds, time.monotonic() - began))

    def _delete_surplus(self) -> None:
        everything, options = self.remote.all(), self._options
        committed = [one for one in everything if one.is_committed]
        valid = [one for one in committed if self.lease.state.counts(one.name, one.epoch)]
        surplus = self.remote.surplus(valid, options.retention, seals_of(checkpoints(self.root)))
        left = [one for one in everything if not one.is_committed and ASIDE not in one.files]
        stray = [one for one in committed if one not in valid]
        if surplus or left or stray:
            self.lease.renew()
            self.remote.delete([*surplus, *left, *stray])

    def _watch_until_end(self) -> None:
        """In a thread of its own, as requests to a store may hang for minutes."""
        options = self._options
        while not self._ended.wait(LOOK_SECONDS):
            self._beat.write()
            if self.bucket.silent_seconds > SILENT_SECONDS:
                self._outage.failed(f"{self.bucket.url} has not answered for {SILENT_SECONDS:g} s.")
            if options.limit_bytes is not None:
                try:
                    best = options.retention if options.needs_best else None
                    trim(self.root, options.limit_bytes, best, self._uploaded, self._held)
                except CheckpointError as error:
                    logger.debug("the directory cannot be read: %s", error)

    def _state(self) -> object:
        """Another one once there is a checkpoint to upload, or one was moved aside."""
        try:
            return [(path.name, os.stat(path / MANIFEST).st_ino) for _, kind, path in named_dirs(self.root) if not kind]
        except (OSError, CheckpointError):
            return None

    def _upload_until_end(self) -> None:
        failures = 0
        while not self._ended.wait(LOOK_SECONDS if not failures else _pause(failures)):
            state = self._state()
            if self.lost is not None or not state or (state == self._done and not failures):
                continue
            failures = 0 if self._try() else failures + 1
            if not failures:
                self._done = state

    def _try(self) -> bool:
        """Upload what is due; whether that worked, and no outage that began meanwhile may have left more."""
        if self.lost is not None:
            return False
        was_away = self._outage.is_on
        try:
            if was_away:
                self.bucket.get(LEASE)
                self._outage.answered()
            self.sync()
        except LostLeaseError as error:
            self._lose(error)
        except (OnstepError, OSError) as error:
            if not self._given_up.is_set():
                self._outage.failed(str(error))
        else:
            if was_away or not self._outage.is_on:
                self._outage.ended()
                return True
        return False

    def _finish(self) -> bool:
        """Upload what is due; whether everything is there."""
        deadline, failures = time.monotonic() + END_SECONDS, 0
        while not self._try():
            failures += 1
            if self.lost is not None or self._given_up.is_set():
                return False
            if time.monotonic() + _pause(failures) > deadline:
                reached = f"{self.bucket.url} could not be reached for {END_SECONDS:g} s at the end of the run"
                self.unfinished = f"{reached}; {self._remedy}"
                logger.error("%s", self.unfinished)
                return False
            self._given_up.wait(_pause(failures))
        return True

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


def _pause(failures: int) -> float:
    """Seconds until the next attempt after so many."""
    return PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS)) - 1]
