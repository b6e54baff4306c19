"""Keeps files of object stores in the user's cache: each version is downloaded once, and used only if it is complete.

A version is a file `files/<key>` and a record of it, `files/<key>.json`, which is written last: without it, and with
another size than it says, there is no version. Directories in `views/` show versions under the paths that they have in
their stores, as links.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from onstep.data.corpus.build_cache import locked
from onstep.data.urls.objects import StoredFile, unreadable
from onstep.errors import DataError, StoreError
from onstep.files.bounded_reading import read_json
from onstep.files.durability import replace_durably, sync_dir
from onstep.stores.bucket import RANGE_BYTES, Bucket, Listed
from onstep.stores.parallel import for_each

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CachedFile:
    """The record of a downloaded version."""

    url: str
    size: int
    """Bytes."""
    etag: str
    downloaded_at: str
    """ISO 8601, in UTC."""
    file: str
    """The name of the local file."""


class UrlCache:
    """The downloaded files, in a directory that any number of processes share.

    Args:
        directory: where; it is made when something is downloaded.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files, self._views = directory / "files", directory / "views"

    def entries(self) -> list[CachedFile]:
        """The complete files, by URL and time."""
        found = [entry for path in self._files.glob("*.json") if (entry := self._entry(path.stem)) is not None]
        return sorted(found, key=lambda one: (one.url, one.downloaded_at))

    def clear(self) -> None:
        """Delete all of it; no run may be reading from it.

        Raises:
            OSError: if that is not allowed.
        """
        for directory in (self._views, self._files):
            with suppress(FileNotFoundError):
                shutil.rmtree(directory)

    def fetch(self, files: Sequence[StoredFile]) -> None:
        """Download what is missing; another process that downloads the same file is waited for.

        Raises:
            DataError: if a file cannot be read, or the cache cannot be written.
        """
        missing = [one for one in files if not self._has(one)]
        if not missing:
            return
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            size = sum(one.size for one in missing)
            logger.info("downloading %d files (%.1f MB) of dataset.paths to %s", len(missing), size / 1e6, self._files)
            for_each([one for one in missing if one.size <= RANGE_BYTES], self._fetch)
            for one in missing:  # large ones one by one, as each is read by parallel ranges
                self._fetch(one)
        except OSError as error:
            raise DataError(
                f"cannot write downloaded files to {str(self.directory)!r}: {error.strerror or error}; set "
                f"dataset.cache_dir or ONSTEP_CACHE to a writable directory with enough free space"
            ) from error

    def view(self, files: Sequence[StoredFile]) -> Path:
        """A directory with these versions, which have been fetched, under the paths that `StoredFile.place` gives.

        Raises:
            DataError: if one of the paths is a directory of another, or the cache cannot be written.
        """
        key = blake2b("\n".join(sorted(one.key for one in files)).encode(), digest_size=16).hexdigest()
        view = self._views / key
        try:
            if not view.exists():
                self._views.mkdir(parents=True, exist_ok=True)
                self._build(view, files)
        except OSError as error:
            raise DataError(
                f"cannot link downloaded files in {str(view)!r}: {error.strerror or error}; a name in a store can be a "
                f"file and a directory, which a local path cannot: name the files that are meant"
            ) from error
        return view

    def _build(self, view: Path, files: Sequence[StoredFile]) -> None:
        temporary = view.with_name(f".{view.name}-{secrets.token_hex(4)}")
        try:
            for one in files:
                link = temporary / one.place
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(os.path.relpath(self._files / one.key, view / one.place.parent))
            for directory, _, _ in os.walk(temporary):
                sync_dir(Path(directory))
            try:
                temporary.rename(view)
            except OSError:
                if not view.exists():  # else another process was faster
                    raise
            sync_dir(self._views)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _fetch(self, one: StoredFile) -> None:
        if self._has(one):
            return
        path, part = self._files / one.key, self._files / f"{one.key}.part"
        with locked(path):
            if self._has(one):
                return
            try:
                Bucket(f"{one.store}/").download_version(Listed(one.name, one.size, one.tag), part)
            except StoreError as error:
                raise unreadable(one.url, error) from None
            os.replace(part, path)
            sync_dir(self._files)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            entry = CachedFile(one.url, one.size, one.tag, now, one.key)
            replace_durably(path.with_suffix(".json"), json.dumps(asdict(entry), indent=1) + "\n")

    def _has(self, one: StoredFile) -> bool:
        return self._entry(one.key) is not None

    def _entry(self, key: str) -> CachedFile | None:
        """The record of a version, if all of it is there."""
        try:
            entry = CachedFile(**read_json(self._files / f"{key}.json"))
            is_whole = (self._files / key).stat().st_size == entry.size
        except (OSError, DataError, TypeError):
            return None
        return entry if is_whole else None
