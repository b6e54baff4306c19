"""Finds the objects in a store that the URLs of `dataset.paths` name: files, directories and globs, as on a disk."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from onstep.config import DatasetConfig
from onstep.data.corpus.hf_datasets import READ_SUFFIXES
from onstep.data.corpus.text_files import JSONL_SUFFIXES, TEXT_SUFFIXES
from onstep.errors import DataError, StoreError
from onstep.stores.bucket import Bucket, Listed
from onstep.stores.lease import LEASE
from onstep.stores.urls import check_url, without_secrets

_RUN_MARKS = frozenset({".run.lock", LEASE})
"""Files in the directory of every run, whose logs and records are not a corpus."""


@dataclass(frozen=True)
class StoredFile:
    """A file in an object store, in the version that was found there."""

    store: str
    """The URL of the bucket or container: `s3://bucket`."""
    name: str
    """The path in it."""
    size: int
    """Bytes."""
    tag: str
    """The entity tag: another content has another one."""

    @property
    def url(self) -> str:
        """The URL of the file."""
        return f"{self.store}/{self.name}"

    @property
    def key(self) -> str:
        """A name for this version, which is safe as that of a local file."""
        return blake2b(f"{self.url}\0{self.tag}\0{self.size}".encode(), digest_size=16).hexdigest()

    @property
    def place(self) -> PurePosixPath:
        """The path of the file among the local copies of all stores."""
        return place_of(self.url)


def place_of(url: str) -> PurePosixPath:
    """Where a URL is among the local copies of all stores: `s3/bucket/corpus` for `s3://bucket/corpus/`.

    Args:
        url: of an object store; it has passed `check_url`.
    """
    parts = urlsplit(url)
    return PurePosixPath(parts.scheme, *filter(None, [parts.netloc, *parts.path.split("/")]))


def stored_files(config: DatasetConfig) -> tuple[StoredFile, ...]:
    """The files that the URLs of `dataset.paths` name, in the versions that are there now. One or two requests a URL.

    Of a directory, those count that training would read from a local one.

    Raises:
        DataError: for a URL without files, or one that cannot be read.
        ConfigError: for a URL with credentials.
    """
    found: dict[str, StoredFile] = {}
    for url in config.paths:
        check_url("dataset.paths", url)
        try:
            named = list(_named(url, config.kind))
        except StoreError as error:
            raise unreadable(url, error) from None
        if not named:
            raise DataError(
                f"dataset.paths: {url} names no file that dataset.kind={config.kind} reads; check the URL: a file, a "
                f"directory, or a glob."
            )
        found |= {one.url: one for one in named}
    return tuple(sorted(found.values(), key=lambda one: one.url))


def unreadable(url: str, error: StoreError) -> DataError:
    """The error for data that cannot be read from its store.

    Args:
        url: of the data.
        error: what the store, or the library, says.
    """
    return DataError(
        f"dataset.paths: {without_secrets(url)} cannot be read: {error} Check the URL, its permissions and the "
        f"credentials in the environment, or copy the files to a local directory."
    )


def _named(url: str, kind: str) -> Iterator[StoredFile]:
    parts = urlsplit(url)
    store, path = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
    bucket = Bucket(f"{store}/")
    if kind == "megatron":
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        pair = [bucket.head(f"{prefix}{suffix}") for suffix in (".idx", ".bin")]
        return (_stored(store, one) for one in pair if one is not None)
    single = bucket.head(path) if path else None
    if single is not None and not (single.size == 0 and parts.path.endswith("/")):
        return iter([_stored(store, single)])
    if glob.has_magic(path):
        pattern = path.split("/")
        fixed = next(at for at, part in enumerate(pattern) if glob.has_magic(part))
        listed = bucket.list("/".join(pattern[:fixed]))
        return (_stored(store, one) for one in _without_runs(listed, fixed) if _is_meant(one, pattern, kind))
    listed = bucket.list(path)
    depth = len(path.split("/")) if path else 0
    return (_stored(store, one) for one in _without_runs(listed, depth) if _is_read(one, depth, kind))


def _stored(store: str, one: Listed) -> StoredFile:
    parts = one.name.split("/")
    if one.tag is None or not all(parts) or {".", ".."} & {*parts} or "\0" in one.name:
        raise DataError(
            f"dataset.paths: {store}/{one.name!r} cannot be copied to a file: its path must be without '.', '..' and "
            f"empty parts, and its store must give an entity tag; rename the object."
        )
    return StoredFile(store, one.name, one.size, one.tag)


def _without_runs(listed: Sequence[Listed], depth: int) -> Iterator[Listed]:
    """Without the markers of directories that some tools make, and what is in directories of runs below the first."""
    paths = [PurePosixPath(one.name) for one in listed]
    directories = {str(parent) for path in paths for parent in path.parents}
    runs = {path.parent for path in paths if path.name in _RUN_MARKS and len(path.parent.parts) > depth}
    for one, path in zip(listed, paths, strict=True):
        is_marker = one.size == 0 and one.name in directories
        if not is_marker and runs.isdisjoint(path.parents):
            yield one


def _is_read(one: Listed, depth: int, kind: str) -> bool:
    """Whether training reads such a file from a directory, given the number of parts of the directory's path."""
    below = PurePosixPath(*one.name.split("/")[depth:])
    suffixes = TEXT_SUFFIXES if kind == "text" else READ_SUFFIXES | JSONL_SUFFIXES
    return below.suffix.lower() in suffixes and not any(part.startswith(".") for part in below.parts)


def _is_meant(one: Listed, pattern: Sequence[str], kind: str) -> bool:
    """Whether a glob matches a file, or a directory from which it is read."""
    parts = one.name.split("/")
    if _matches(pattern, parts):
        return True
    return any(_matches(pattern, parts[:at]) and _is_read(one, at, kind) for at in range(1, len(parts)))


def _matches(pattern: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a glob matches the parts of a path, as the module `glob` does with `recursive=True`."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        is_deeper = bool(parts) and not parts[0].startswith(".") and _matches(pattern, parts[1:])
        return is_deeper or _matches(pattern[1:], parts)
    return bool(parts) and _fits(pattern[0], parts[0]) and _matches(pattern[1:], parts[1:])


def _fits(pattern: str, name: str) -> bool:
    return fnmatchcase(name, pattern) and (pattern.startswith(".") or not name.startswith("."))
