"""Performs the requests of Onstep to an object store: reads, puts with and without conditions, lists, deletions."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

from onstep.errors import StoreError, extra
from onstep.files.durability import sync_dir
from onstep.stores.credentials import shared_credentials
from onstep.stores.parallel import CONCURRENCY, for_each
from onstep.stores.reasons import reason_of
from onstep.stores.urls import without_secrets

T = TypeVar("T")

PART_BYTES = 8 * 1024**2
"""The size of the parts in which larger files are uploaded."""
_MOST_PARTS = 9_000
"""Of an object; S3 accepts 10,000."""
RANGE_BYTES = 32 * 1024**2
"""The size of the ranges in which files are downloaded."""
_CLIENT = {"connect_timeout": "10s", "timeout": "120s", "allow_http": True}
_RETRIES: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
"""For a request; what fails then is repeated as a whole, later."""
Tag = tuple[str | None, str | None]
"""What tells a version of an object from others: its entity tag, and the version number of stores that compare that."""


@dataclass(frozen=True)
class Listed:
    """An object as a list shows it."""

    name: str
    """Relative to the bucket's URL."""
    size: int
    """Bytes."""
    tag: str | None = None
    """Its entity tag, which another content has another one of; None where the list is not a store's."""


class Bucket:
    """The objects below a URL; safe to use from several threads.

    Credentials are those that the library finds itself: the environment, roles, and for S3 the files in `~/.aws`.

    Args:
        url: such as `s3://bucket/runs/name`, which has passed `check_url`.

    Raises:
        MissingExtraError: without the library.
        StoreError: if the store cannot be set up, as with a setting in the environment that is wrong.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with extra("stores", f"{without_secrets(url)} requires the library obstore"):
            self._library: Any = importlib.import_module("obstore")
            stores: Any = importlib.import_module("obstore.store")
        self._errors: Any = importlib.import_module("obstore.exceptions")
        self.directory = Path(unquote(url.removeprefix("file://"))) if url.startswith("file:") else None
        """Of `file://`, whose objects cannot be replaced on a condition. It is made by the first object."""
        options: dict[str, Any] = {}
        if self.directory is None:
            options = {"client_options": _CLIENT, "retry_config": _RETRIES}
        if url.startswith(("s3:", "s3a:")):
            options |= shared_credentials()
        self._open = lambda: stores.from_url(url, **options)
        self._opened: Any = None
        self._is_left = False
        self._turn, self._waiting, self._answered_at = threading.Lock(), 0, 0.0
        if self.directory is None:
            self._store()

    def leave(self) -> None:
        """Refuse further requests, and end uploads before their next part."""
        self._is_left = True

    @property
    def silent_seconds(self) -> float:
        """For how long requests have been waiting without any answer; 0 if none waits."""
        with self._turn:
            return time.monotonic() - self._answered_at if self._waiting else 0.0

    def get(self, name: str) -> tuple[bytes, Tag] | None:
        """The content and the tag of an object; None if there is none.

        Args:
            name: relative to the URL.
        """

        if self._is_missing:
            return None

        def read() -> tuple[bytes, Tag] | None:
            try:
                found = self._library.get(self._store(), name)
                return bytes(found.bytes()), _tag(found.meta)
            except FileNotFoundError:
                return None

        return self._ask(f"reading {name}", read)

    def put(self, name: str, content: bytes) -> Tag:
        """Write an object; its tag.

        Args:
            name: relative to the URL.
            content: the bytes.
        """
        store = self._store(makes=True)
        return self._ask(f"writing {name}", lambda: _tag(self._library.put(store, name, content)))

    def upload(self, name: str, path: Path, sent: Callable[[int], object] = lambda number: None) -> Tag:
        """Write a file as an object, in parallel parts if it is large; its tag.

        Args:
            name: relative to the URL.
            path: of the file.
            sent: called with the number of bytes that have arrived, as far as known, from time to time.
        """
        store = self._store(makes=True)

        def write() -> Tag:
            size = path.stat().st_size
            if size <= PART_BYTES:
                return _tag(self._library.put(store, name, path.read_bytes()))
            part = max(PART_BYTES, size // _MOST_PARTS)
            parts = self._parts(path, part, sent)
            return _tag(self._library.put(store, name, parts, chunk_size=part, max_concurrency=CONCURRENCY))

        return self._ask(f"writing {name}", write)

    def _parts(self, path: Path, part: int, sent: Callable[[int], object]) -> Iterator[bytes]:
        """The parts of a file. The next one is asked for when there is room: by then, all but the last few are sent."""
        with open(path, "rb", buffering=0) as file:
            number = 0
            while content := file.read(part):
                self._check_not_left("writing")
                self._note_answer()
                sent(max(0, number - CONCURRENCY) * part)
                number += 1
                yield content

    def create(self, name: str, content: bytes) -> Tag | None:
        """Write an object that does not exist yet; its tag, or None if there is one.

        None may be due to an earlier attempt of the same request, whose answer was lost.

        Args:
            name: relative to the URL.
            content: the bytes.
        """

        def write() -> Tag | None:
            try:
                return _tag(self._library.put(self._store(makes=True), name, content, mode="create"))
            except self._errors.AlreadyExistsError:
                return None

        return self._ask(f"creating {name}", write)

    def swap(self, name: str, content: bytes, tag: Tag) -> Tag | None:
        """Replace an object if it still has this tag; its new tag, or None if it has another one.

        In a directory the condition is not checked: the lease of a directory is a lock of the system.

        Args:
            name: relative to the URL.
            content: the bytes.
            tag: of the version to replace.
        """
        if self.directory is not None:
            return self.put(name, content)

        version = {key: value for key, value in zip(("e_tag", "version"), tag, strict=True) if value is not None}

        def write() -> Tag | None:
            try:
                return _tag(self._library.put(self._store(), name, content, mode=version))
            except (self._errors.PreconditionError, FileNotFoundError):
                return None

        return self._ask(f"replacing {name}", write)

    def list(self, prefix: str = "") -> list[Listed]:
        """All objects in a directory and below, by name.

        Args:
            prefix: the directory, relative to the URL.
        """
        if self._is_missing:
            return []

        def read() -> list[Listed]:
            chunks = self._library.list(self._store(), prefix or None)
            return [_listed(one) for chunk in chunks for one in chunk]

        return sorted(self._ask(f"listing {prefix or 'it'}", read), key=lambda one: one.name)

    def head(self, name: str) -> Listed | None:
        """An object as a list would show it; None if there is none.

        Args:
            name: relative to the URL.
        """
        if self._is_missing:
            return None

        def read() -> Listed | None:
            try:
                return _listed(self._library.head(self._store(), name))
            except FileNotFoundError:
                return None

        return self._ask(f"looking up {name}", read)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already do not matter.

        Args:
            names: relative to the URL.
        """

        if self._is_missing:
            return

        def remove(name: str) -> None:
            try:
                self._library.delete(self._store(), name)
            except FileNotFoundError:
                return

        for_each(names, lambda name: self._ask(f"deleting {name}", lambda: remove(name)))

    def download(self, objects: Iterable[Listed], directory: Path) -> None:
        """Write objects to files, by ranges in parallel; their contents are durable on return.

        Args:
            objects: those to read.
            directory: where the files are made, by the objects' names.
        """
        listed = list(objects)
        for one in listed:
            path = directory / one.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
            os.truncate(path, one.size)
        ranges = [(one, start) for one in listed for start in range(0, one.size, RANGE_BYTES)]
        for_each(ranges, lambda each: self._download(each[0], each[1], directory))
        for folder in {(directory / one.name).parent for one in listed}:
            sync_dir(folder)

    def download_version(self, one: Listed, path: Path) -> None:
        """Write an object to a file, by ranges in parallel; its content is durable on return.

        Args:
            one: as a list has shown it.
            path: of the file, which is replaced.

        Raises:
            StoreError: also if the object has been replaced since it was listed.
        """
        path.write_bytes(b"")
        os.truncate(path, one.size)
        for_each(range(0, one.size, RANGE_BYTES), lambda start: self._download_to(path, one, start, one.tag))
        sync_dir(path.parent)

    def _download(self, one: Listed, start: int, directory: Path) -> None:
        self._download_to(directory / one.name, one, start)

    def _download_to(self, path: Path, one: Listed, start: int, tag: str | None = None) -> None:
        end = min(start + RANGE_BYTES, one.size)

        def read() -> bytes:
            if tag is None:
                return bytes(self._library.get_range(self._store(), one.name, start=start, end=end))
            options = {"range": (start, end), "if_match": tag}
            return bytes(self._library.get(self._store(), one.name, options=options).bytes())

        content = self._ask(f"reading {one.name}", read)
        if len(content) != end - start:
            raise StoreError(f"{self.url}: reading {one.name} gave {len(content):,} of {end - start:,} bytes.")
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    @property
    def _is_missing(self) -> bool:
        """Whether it is a directory that nobody has made: readers leave that so."""
        return self.directory is not None and not self.directory.is_dir()

    def _store(self, *, makes: bool = False) -> Any:
        """The library's store; a directory is made for what is about to be written."""
        if self._opened is None:
            if makes and self.directory is not None:
                self._ask("making it", lambda: os.makedirs(self.directory or "", exist_ok=True))
            self._opened = self._ask("setting up", self._open)
        return self._opened

    def _ask(self, doing: str, request: Callable[[], T]) -> T:
        self._check_not_left(doing)
        with self._turn:
            if not self._waiting:
                self._answered_at = time.monotonic()
            self._waiting += 1
        try:
            answer = request()
        except self._errors.BaseError as error:
            raise StoreError(f"{self.url}: {doing} failed: {reason_of(error)}") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.url}: {doing} failed: {reason_of(error)}") from None
        finally:
            with self._turn:
                self._waiting -= 1
        self._note_answer()
        return answer

    def _note_answer(self) -> None:
        with self._turn:
            self._answered_at = time.monotonic()

    def _check_not_left(self, doing: str) -> None:
        if self._is_left:
            raise StoreError(f"{self.url}: {doing} was given up.")


def _listed(facts: Any) -> Listed:
    return Listed(facts["path"], facts["size"], facts["e_tag"])


def _tag(facts: Any) -> Tag:
    return facts["e_tag"], facts["version"]
