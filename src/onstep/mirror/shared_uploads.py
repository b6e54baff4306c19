"""Shares the upload of a checkpoint between the ranks of a run, by files in the directory that all of them see.

A file to upload is an entry that one rank claims by renaming it: ranks need no collective, and a rank that is busy
does fewer. Rank 0 puts the manifest once all entries are done.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from onstep.errors import OnstepError, StoreError
from onstep.mirror.beat import Beat
from onstep.stores.bucket import Bucket
from onstep.stores.parallel import for_each

_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 60.0
"""After which rank 0 uploads what another rank has claimed and not finished."""
_CLOSING_SECONDS = 5.0


class SharedUploads:
    """The files that are to be uploaded, in a directory.

    Args:
        place: the directory, on the disk that all ranks see.
    """

    def __init__(self, place: Path) -> None:
        self._todo, self._taken, self._done = place / "todo", place / "taken", place / "done"
        self._place = place
        self._sizes: dict[str, int] = {}
        """Bytes of the files of this upload, by entry."""
        self._sent: dict[str, int] = {}
        """Of those that this rank is uploading, how many have arrived."""

    def upload(self, bucket: Bucket, source: Path, name: str, paths: Sequence[str]) -> None:
        """Upload files of a directory together with the other ranks, the largest first; called on rank 0.

        Args:
            bucket: where to.
            source: the local directory, which all ranks see.
            name: the directory in the bucket.
            paths: the files, relative to both.

        Raises:
            StoreError: if this rank could not upload one.
        """
        shutil.rmtree(self._place, ignore_errors=True)
        for directory in (self._taken, self._done):
            directory.mkdir(parents=True)
        by_size = sorted(paths, key=lambda path: (source / path).stat().st_size, reverse=True)
        ready = self._place / "ready"
        ready.mkdir()
        for number, path in enumerate(by_size):
            (ready / f"{number:06}").write_text(json.dumps([str(source / path), f"{name}/{path}"]))
        self._sizes = {f"{number:06}": (source / path).stat().st_size for number, path in enumerate(by_size)}
        ready.rename(self._todo)
        try:
            self._work(bucket, range(8))
            self._wait(bucket, len(by_size))
        finally:
            self._sizes = {}
            shutil.rmtree(self._place, ignore_errors=True)

    def expect(self, source: Path) -> None:
        """Let all of a directory count as left, until its upload begins.

        Args:
            source: the local directory.
        """
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        self._sizes = {"": size}

    @property
    def left_bytes(self) -> int:
        """Bytes of the upload under way that are not known to have arrived; called on rank 0."""
        done: set[str] = set()
        with suppress(OSError):
            done = set(os.listdir(self._done))
        return sum(size - self._sent.get(name, 0) for name, size in self._sizes.copy().items() if name not in done)

    def help(self, bucket: Bucket) -> None:
        """Upload what is left to do, on a rank other than 0.

        Raises:
            StoreError: if that failed; another rank then does it.
        """
        self._work(bucket, range(8))

    @property
    def has_work(self) -> bool:
        """Whether there are files that no rank has claimed."""
        try:
            return any(os.scandir(self._todo))
        except OSError:
            return False

    def _work(self, bucket: Bucket, threads: Sequence[int]) -> None:
        def work(_: int) -> None:
            while (entry := self._claim()) is not None:
                self._finish(bucket, entry)

        for_each(threads, work)

    def _claim(self) -> Path | None:
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._todo)):
                with suppress(FileNotFoundError):
                    return (self._todo / name).rename(self._taken / name)
        return None

    def _finish(self, bucket: Bucket, entry: Path) -> None:
        try:
            path, target = json.loads(entry.read_text())
            bucket.upload(target, Path(path), lambda number: self._sent.__setitem__(entry.name, number))
        except (OnstepError, OSError) as error:
            with suppress(OSError):
                entry.rename(self._todo / entry.name)
            raise StoreError(f"{error}") from None
        finally:
            self._sent.pop(entry.name, None)
        with suppress(FileNotFoundError):
            entry.rename(self._done / entry.name)

    def _wait(self, bucket: Bucket, number: int) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while len(os.listdir(self._done)) < number:
            self._work(bucket, [0])
            if time.monotonic() > deadline:
                for entry in sorted(self._taken.iterdir()):
                    self._finish(bucket, entry)
            time.sleep(0.02)


class Helper:
    """Uploads a share of each checkpoint on a rank other than 0, in a thread, until `finish` or `close`.

    Args:
        url: of the run.
        place: see `SharedUploads`.
        beat: what rank 0 shows of itself.
    """

    def __init__(self, url: str, place: Path, beat: Beat) -> None:
        self._url, self._uploads, self._beat, self._ended = url, SharedUploads(place), beat, threading.Event()
        self._thread = threading.Thread(target=self._run, name="onstep-upload", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Help with the last upload, until rank 0 has ended it or has ended itself."""
        self._beat.wait_for_end()
        self.close()

    def close(self) -> None:
        """End the thread; what it is uploading is waited for a little, and else done by rank 0."""
        self._ended.set()
        self._thread.join(_CLOSING_SECONDS)

    def _run(self) -> None:
        bucket: Bucket | None = None
        while not self._ended.wait(_LOOK_SECONDS):
            if self._uploads.has_work:
                with suppress(OnstepError):  # rank 0 tries again, and says so
                    bucket = bucket or Bucket(self._url)
                    self._uploads.help(bucket)
