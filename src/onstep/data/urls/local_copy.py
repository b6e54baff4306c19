"""Gives the local paths that a configuration reads in place of URLs: files are downloaded once, into a cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from onstep.config import DatasetConfig
from onstep.data.corpus.build_cache import default_cache_dir
from onstep.data.corpus.input_files import InputFiles, base_of, dataset_files
from onstep.data.urls.cache import UrlCache
from onstep.data.urls.objects import StoredFile, place_of, stored_files
from onstep.errors import DataError
from onstep.stores.urls import SCHEMES, is_url

Listing = tuple[StoredFile, ...]
"""The files that a configuration names, in the versions to read."""

_PINNED: dict[tuple[str, ...], Listing] = {}
"""What the run of this process reads, by kind and paths: the versions that were there when it started."""


@dataclass(frozen=True)
class LocalCopy:
    """A configuration whose paths are local."""

    config: DatasetConfig
    view: Path | None = None
    """The directory that shows the downloaded files by scheme, bucket and path; None without URLs."""
    tags: dict[str, str] = field(default_factory=dict)
    """The entity tag of each downloaded file, by URL."""

    def url_of(self, path: str | Path) -> str:
        """The URL that a path in the view is the copy of."""
        assert self.view is not None
        scheme, *parts = Path(path).relative_to(self.view).parts
        return f"{scheme}://{'/' * (scheme == 'file')}{'/'.join(parts)}"

    @contextmanager
    def naming_urls(self) -> Iterator[None]:
        """A context in which errors about data name its URLs in place of the paths of their copies."""
        try:
            yield
        except DataError as error:
            if self.view is None:
                raise
            text = str(error)
            for scheme in SCHEMES:
                text = text.replace(f"{self.view}/{scheme}/", f"{scheme}://{'/' * (scheme == 'file')}")
            raise DataError(text) from error


def has_urls(config: DatasetConfig) -> bool:
    """Whether files are downloaded before they are read; a stream reads them where they are."""
    return config.kind != "stream" and any(map(is_url, config.paths))


def listing_of(config: DatasetConfig) -> Listing:
    """The versions that a configuration reads: those that this process's run has pinned, else those that are there now.

    Raises:
        DataError: as `stored_files`.
    """
    return _PINNED.get(_key(config)) or stored_files(config)


def pin(config: DatasetConfig, listing: Listing | None) -> None:
    """Let everything in this process read these versions, until they are pinned again.

    Args:
        config: names the files.
        listing: what `stored_files` gave, on this rank or another; None for those that are there at each look.
    """
    _PINNED.pop(_key(config), None)
    if listing is not None:
        _PINNED[_key(config)] = listing


def url_cache(config: DatasetConfig) -> UrlCache:
    """The downloaded files, in `urls` of the directory of the token cache."""
    directory = default_cache_dir() if config.cache_dir is None else Path(os.path.expanduser(config.cache_dir))
    return UrlCache(directory.absolute() / "urls")


def local_copy(config: DatasetConfig) -> LocalCopy:
    """The same configuration with local paths; what its URLs name is downloaded, unless the cache has it.

    Raises:
        DataError: if a file cannot be read, or the cache cannot be written.
        MissingExtraError: without the library that reads object stores.
    """
    if not has_urls(config):
        return LocalCopy(config)
    listing, cache = listing_of(config), url_cache(config)
    cache.fetch(listing)
    view = cache.view(listing)
    paths = [str(view / place_of(url)) for url in config.paths]
    return LocalCopy(replace(config, paths=paths), view, {one.url: one.tag for one in listing})


def input_files(config: DatasetConfig) -> InputFiles | None:
    """As `dataset_files`, also of URLs: the digest is that of the same files in a local directory; files have URLs.

    Raises:
        DataError: as `local_copy` and `dataset_files`.
    """
    copy = local_copy(config)
    with copy.naming_urls():
        found = dataset_files(copy.config)
    if found is None or copy.view is None:
        return found
    base = base_of(copy.config.paths)
    urls = {name: copy.url_of(os.path.normpath(os.path.join(base, name))) for name in found.files}
    return InputFiles(found.digest, {urls[name]: digest for name, digest in found.files.items()}, copy.tags)


def _key(config: DatasetConfig) -> tuple[str, ...]:
    return config.kind, *config.paths
