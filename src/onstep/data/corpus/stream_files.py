"""Finds and opens the files of a stream: local ones, behind URLs, or of datasets on the Hub."""

from __future__ import annotations

import glob
import gzip
import io
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, cast

from onstep.data.corpus.hf_datasets import OwnSplits
from onstep.data.corpus.hub_names import check_exists, commit_of, hub_name
from onstep.data.corpus.remote_file import RemoteFile
from onstep.errors import DataError, OnstepError, extra, text_of
from onstep.files.bounded_reading import open_file

LINES = frozenset({".jsonl", ".ndjson", ".jsonlines", ".json"})
"""Suffixes of files with a JSON object on each line."""
_COMPRESSED = frozenset({".gz", ".zst"})
_NUMBERED = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MAX_NUMBERED = 1_000_000
_BUFFER_BYTES = 1 << 20
_EVALUATED = {"validation": ("validation", "valid", "val", "dev"), "test": ("test",)}


def kind_of(name: str) -> tuple[str, str]:
    """The suffix of a file of records, such as `.jsonl`, and that of its compression, which is empty for none.

    Raises:
        DataError: for a file that a stream cannot read.
    """
    path = PurePath(name.partition("?")[0] if "://" in name else name)
    compression = path.suffix.lower() if path.suffix.lower() in _COMPRESSED else ""
    suffix = PurePath(path.stem).suffix.lower() if compression else path.suffix.lower()
    if suffix not in LINES and (suffix != ".parquet" or compression):
        raise DataError(
            f"a stream cannot read {name}: it reads .parquet, and {', '.join(sorted(LINES))} with or without "
            f"{' and '.join(sorted(_COMPRESSED))}; convert the file, or name others in dataset.paths"
        )
    return suffix, compression


def find_stream(paths: Sequence[str], *, subset: str | None, split: str) -> OwnSplits[list[str]]:
    """The files of a split of a stream in stored order, and those of its own validation and test splits.

    A path is a file, a glob, a URL, in which `{000..127}` stands for numbers, a directory laid out as on the Hub, or
    the name of a dataset there. Only the latter two have splits; they are found by the `datasets` library, which
    executes nothing of them.

    Raises:
        DataError: for a path without files, or files that a stream cannot read.
        MissingExtraError: if `datasets` is not installed and is needed.
    """
    found = [_files_of(path, subset, split) for path in paths]
    train = [name for files in found for name in files.get(split, [])]
    own = {
        kind: [name for files in found for word in words if word != split for name in files.get(word, [])]
        for kind, words in _EVALUATED.items()
    }
    for name in (*train, *own["validation"], *own["test"]):
        kind_of(name)
    return OwnSplits(train, own["validation"] or None, own["test"] or None)


def find_all(paths: Sequence[str]) -> list[str]:
    """The files of all splits of some paths.

    Raises:
        DataError: as `find_stream`.
    """
    names = [name for path in paths for files in _files_of(path, None, "train").values() for name in files]
    for name in names:
        kind_of(name)
    return names


def open_stream_file(name: str) -> IO[bytes]:
    """Open a file for reading bytes as they are stored. It can seek.

    Raises:
        OSError: if it cannot be opened.
    """
    if name.startswith(("http://", "https://")):
        return io.BufferedReader(RemoteFile(name), _BUFFER_BYTES)
    if "://" not in name:
        return open_file(name)
    with extra("datasets", f"reading {name.partition('://')[0]}:// requires the library 'fsspec'"):
        import fsspec
    return io.BufferedReader(fsspec.open(name, "rb").open(), _BUFFER_BYTES)


def size_of_file(file: IO[bytes]) -> int | None:
    """Number of bytes of an open file; None if it is unknown."""
    raw = getattr(file, "raw", file)
    size = getattr(raw, "size", None)
    return size if isinstance(raw, RemoteFile) or isinstance(size, int) else os.fstat(file.fileno()).st_size


def decompressed(file: IO[bytes], compression: str) -> IO[bytes]:
    """The content of a file, of which a place is reached by reading up to it."""
    if compression == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    return io.BufferedReader(_ZstdFile(file), _BUFFER_BYTES) if compression else file


@contextmanager
def reading(name: str) -> Iterator[None]:
    """A context that turns whatever a library raises about a file into a `DataError` of one line."""
    try:
        yield
    except OnstepError:
        raise
    except Exception as error:  # damaged files make the libraries raise anything
        reason = " ".join(text_of(error).split())
        reason = getattr(error, "strerror", None) or reason or type(error).__name__
        raise DataError(
            f"cannot read {name}: {reason}; restore the file or the connection, and start the run again: it continues "
            "at the same record"
        ) from error


class _ZstdFile(io.RawIOBase):
    """The content of a file in Zstandard's format, of one or several frames."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__()
        self._file = file
        self._rewind()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise OSError("a compressed file has no known end")
        if whence == io.SEEK_CUR:  # as `tell` asks for
            offset += self._at
        if offset < self._at:
            self._rewind()
        while self._at < offset and (skipped := len(self._stream.read(min(offset - self._at, _BUFFER_BYTES)))):
            self._at += skipped
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _rewind(self) -> None:
        with extra("datasets", "reading .zst requires the library 'pyarrow'"):
            import pyarrow
        self._file.seek(0)
        self._stream: Any = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._file, mode="r"), "zstd")
        self._at = 0


def _files_of(path: str, subset: str | None, split: str) -> dict[str, list[str]]:
    """The files of a path by the name of their split."""
    given = Path(os.path.expanduser(path))
    if "://" in path:
        return {split: _behind(path)}
    if given.is_file():
        return {split: [str(given)]}
    check_exists(path)
    if given.is_dir() or (hub_name(path) is not None and not glob.has_magic(path)):
        return _laid_out(path, str(given) if given.is_dir() else None, subset, split)
    files = sorted(match for match in glob.glob(str(given), recursive=True) if os.path.isfile(match))
    if not files:
        raise DataError(f"dataset.paths: {path!r} matches no file (working directory: {Path.cwd()}); check the pattern")
    return {split: files}


def _behind(url: str) -> list[str]:
    """The files behind a URL: all of a numbered one, or of a pattern where the file system can list."""
    numbered = _NUMBERED.search(url)
    if numbered is not None:
        first, last = int(numbered[1]), int(numbered[2])
        if not 0 <= last - first < _MAX_NUMBERED:
            raise DataError(f"dataset.paths: {url!r} numbers {last - first + 1:,} files; give 1 to {_MAX_NUMBERED:,}")
        width = len(numbered[1])
        each = (f"{url[: numbered.start()]}{n:0{width}d}{url[numbered.end() :]}" for n in range(first, last + 1))
        return [file for one in each for file in _behind(one)]
    if url.startswith(("http://", "https://")) or not glob.has_magic(url):
        return [url]
    with extra("datasets", f"listing {url} requires the library 'fsspec'"):
        import fsspec
    with reading(url):
        system, pattern = fsspec.core.url_to_fs(url)
        files = sorted(system.unstrip_protocol(one) for one in system.glob(pattern))
    if not files:
        raise DataError(f"dataset.paths: {url!r} matches no file; check the pattern")
    return files


def _laid_out(path: str, directory: str | None, subset: str | None, split: str) -> dict[str, list[str]]:
    """The files of a directory or of a dataset on the Hub by split, as its layout or its README says."""
    with extra("datasets", f"dataset.paths={path} requires the library 'datasets'"):
        import datasets
    name, revision = (directory, None) if directory is not None else hub_name(path) or (path, None)
    if directory is None:
        revision = commit_of(name, revision)  # which says at once that it cannot be reached, as the library does not
    try:
        files = datasets.load_dataset_builder(name, subset, revision=revision).config.data_files
    except Exception as error:  # a directory or README that is not understood makes the library raise anything
        remedy = "name its files instead"
        reason = " ".join(text_of(error).split())
        raise DataError(f"dataset.paths: cannot find the files of {path!r} ({reason}); {remedy}") from error
    by_split = {str(key): [str(file) for file in found] for key, found in (files or {}).items()}
    if not by_split.get(split):
        raise DataError(
            f"dataset.paths: {path!r} has no split {split!r}; set dataset.hf_split to one of {sorted(by_split)}"
        )
    return by_split
