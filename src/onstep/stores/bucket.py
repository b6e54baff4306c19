"""Performs the requests of Onstep to an object store: reads, puts with and without conditions, lists, deletions."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from onstep.errors import StoreError, extra
from onstep.files.durability import sync_dir
from onstep.stores.urls import without_secrets

T = TypeVar("T")

PART_BYTES = 8 * 1024**2
"""The size of the parts in which larger files are uploaded."""
_MOST_PARTS = 9_000
"""Of an object; S3 accepts 10,000."""
RANGE_BYTES = 32 * 1024**2
"""The size of the ranges in which files are downloaded."""
CONCURRENCY = 8
"""Requests at a time, of parts and of files."""
_CLIENT = {"connect_timeout": "10s", "timeout": "120s", "allow_http": True}
_RETRIES: dict[str, Any] = {"max_retries": 4, "retry_timeout": timedelta(seconds=20)}
"""For a request; what fails then is repeated as a whole, later."""
_SHARED_FILES = ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config")


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
        self.is_local = url.startswith("file:")
        """A directory, whose objects cannot be replaced on a condition."""
        options = {"mkdir": True} if self.is_local else {"client_options": _CLIENT, "retry_config": _RETRIES}
        if url.startswith(("s3:", "s3a:")):
            options |= _shared_credentials()
        self._store = self._ask("setting up", lambda: stores.from_url(url, **options))

    def get(self, name: str) -> tuple[bytes, Tag] | None:
        """The content and the tag of an object; None if there is none.

        Args:
            name: relative to the URL.
        """

        def read() -> tuple[bytes, Tag] | None:
            try:
                found = self._library.get(self._store, name)
                return bytes(found.bytes()), _tag(found.meta)
            except FileNotFoundError:
                return None

        return self._ask(f"reading {name}", read)

    def put(self, name: str, content: bytes | Path) -> Tag:
        """Write an object, in parallel parts if it is large; its tag.

        Args:
            name: relative to the URL.
            content: bytes, or the path of a file.
        """

        def write() -> Tag:
            put = self._library.put
            size = len(content) if isinstance(content, bytes) else content.stat().st_size
            part = max(PART_BYTES, size // _MOST_PARTS)
            done = put(self._store, name, content, chunk_size=part, max_concurrency=CONCURRENCY)
            return _tag(done)

        return self._ask(f"writing {name}", write)

    def create(self, name: str, content: bytes) -> Tag | None:
        """Write an object that does not exist yet; its tag, or None if there is one.

        None may be due to an earlier attempt of the same request, whose answer was lost.

        Args:
            name: relative to the URL.
            content: the bytes.
        """

        def write() -> Tag | None:
            try:
                return _tag(self._library.put(self._store, name, content, mode="create"))
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
        if self.is_local:
            return self.put(name, content)

        version = {key: value for key, value in zip(("e_tag", "version"), tag, strict=True) if value is not None}

        def write() -> Tag | None:
            try:
                return _tag(self._library.put(self._store, name, content, mode=version))
            except (self._errors.PreconditionError, FileNotFoundError):
                return None

        return self._ask(f"replacing {name}", write)

    def list(self, prefix: str = "") -> list[Listed]:
        """All objects in a directory and below, by name.

        Args:
            prefix: the directory, relative to the URL.
        """

        def read() -> list[Listed]:
            chunks = self._library.list(self._store, prefix or None)
            return [_listed(one) for chunk in chunks for one in chunk]

        return sorted(self._ask(f"listing {prefix or 'it'}", read), key=lambda one: one.name)

    def head(self, name: str) -> Listed | None:
        """An object as a list would show it; None if there is none.

        Args:
            name: relative to the URL.
        """

        def read() -> Listed | None:
            try:
                return _listed(self._library.head(self._store, name))
            except FileNotFoundError:
                return None

        return self._ask(f"looking up {name}", read)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already do not matter.

        Args:
            names: relative to the URL.
        """

        def remove(name: str) -> None:
            try:
                self._library.delete(self._store, name)
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
                return bytes(self._library.get_range(self._store, one.name, start=start, end=end))
            options = {"range": (start, end), "if_match": tag}
            return bytes(self._library.get(self._store, one.name, options=options).bytes())

        content = self._ask(f"reading {one.name}", read)
        if len(content) != end - start:
            raise StoreError(f"{self.url}: reading {one.name} gave {len(content):,} of {end - start:,} bytes.")
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _ask(self, doing: str, request: Callable[[], T]) -> T:
        try:
            return request()
        except self._errors.BaseError as error:
            raise StoreError(f"{self.url}: {doing} failed: {_reason(error)}") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"{self.url}: {doing} failed: {_reason(error)}") from None


def _listed(facts: Any) -> Listed:
    return Listed(facts["path"], facts["size"], facts["e_tag"])


def _tag(facts: Any) -> Tag:
    return facts["e_tag"], facts["version"]


def for_each(items: Iterable[T], work: Callable[[T], object]) -> None:
    """Do the work for each item, `CONCURRENCY` at a time; the first error is raised once all have ended.

    Args:
        items: what is worked on.
        work: called in threads.
    """
    with ThreadPoolExecutor(CONCURRENCY, thread_name_prefix="onstep-store") as pool:
        done = [pool.submit(work, item) for item in items]
    for one in done:
        one.result()


def _reason(error: BaseException) -> str:
    """What an error of the library says in its first line, without credentials."""
    text = str(error).partition("\n")[0].strip() or type(error).__name__
    return without_secrets(text)[:300].rstrip(".") + "."


def _shared_credentials() -> dict[str, Any]:
    """The credentials of the files in `~/.aws`, which the library does not read itself; none if the environment has."""
    has_own = "AWS_ACCESS_KEY_ID" in os.environ or "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ
    files = [os.path.expanduser(os.environ.get(name, default)) for name, default in _SHARED_FILES]
    if has_own or not any(map(os.path.isfile, files)):
        return {}
    try:
        auth: Any = importlib.import_module("obstore.auth.boto3")
        return {"credential_provider": auth.Boto3CredentialProvider()}
    except ImportError:
        raise StoreError(
            "the credentials in ~/.aws are read by boto3, which is not installed: pip install boto3, or pass "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment."
        ) from None
