"""Reads datasets of the `datasets` library, local or from the Hub, without running code that comes with them."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from onstep.data.corpus.documents import Document
from onstep.data.corpus.hub_names import (
    COMMIT,
    HubUnreachableError,
    check_exists,
    check_subset,
    commit_of,
    hub_commits,
    hub_name,
    pinned,
)
from onstep.data.corpus.reading_bar import reading_bar
from onstep.data.corpus.text_files import JSONL_SUFFIXES, is_visible
from onstep.data.corpus.tokenizer_library import Explained
from onstep.errors import DataError, extra

T = TypeVar("T")

_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
}
"""The library's reader for each file suffix; none of them executes what it reads."""
READ_SUFFIXES = frozenset(_READERS)
"""Suffixes of files that the library reads."""
_READ_BY_LIBRARY = READ_SUFFIXES - JSONL_SUFFIXES
_VALIDATION, _TEST = ("validation", "valid", "val", "dev"), ("test",)
_SPLIT_WORDS = {
    **dict.fromkeys(_VALIDATION, "validation"),
    **dict.fromkeys((*_TEST, "testing", "eval", "evaluation"), "test"),
}
_ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class OwnSplits(Generic[T]):
    """A dataset's splits: the training split, and its own validation and test splits if it has any."""

    train: T
    valid: T | None
    test: T | None
    dropped: frozenset[str] = frozenset()
    """Columns of the training split that are not read."""


Columns = Sequence[str] | Callable[[Sequence[str]], Sequence[str]]


class RowSource:
    """The texts in one column of a dataset of the `datasets` library, one document per row.

    Raises:
        DataError: if the dataset has no such column.
    """

    def __init__(self, dataset: Any, text_key: str, name: str) -> None:
        if text_key not in dataset.column_names:
            columns = ", ".join(map(repr, dataset.column_names)) or "none"
            raise DataError(f"{name} has no column {text_key!r} (its columns: {columns}); set dataset.text_key")
        self.name = name
        self._rows = dataset.select_columns([text_key])
        self._text_key = text_key
        self._fingerprint = fingerprint_of(dataset)

    def add_to(self, digest: Any) -> None:
        """Add the library's fingerprint of the dataset and the column."""
        digest.update(f"\0rows\0{self._fingerprint}\0{self._text_key}".encode())

    def documents(self, label: str | None) -> Iterator[Document]:
        """One document per row, read in small batches, with a progress bar over the rows."""
        for row, place in rows_of(self._rows, self.name, label):
            text = row[self._text_key]
            if not isinstance(text, str):
                raise DataError(
                    f"{self.name}:{place}: column {self._text_key!r} must hold strings, got {type(text).__name__}; "
                    "set dataset.text_key, or remove such rows"
                )
            if text:
                yield Document(text.encode("utf-8", "surrogatepass"), Path(self.name), place)


def rows_of(dataset: Any, name: str, label: str | None) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of a dataset, numbered from 1, with a progress bar named `label`; None shows none."""
    with reading_bar(label, len(dataset), " rows") as bar:
        number = 0
        for block in _blocks_of(dataset, name):
            columns = list(block)
            for values in zip(*block.values(), strict=True):
                number += 1
                yield dict(zip(columns, values, strict=True)), number
            bar.update(number - bar.n)


def _blocks_of(dataset: Any, name: str) -> Iterator[dict[str, Any]]:
    reading = Explained(f"cannot read the rows of {name}; check its files")
    with reading:
        blocks = dataset.iter(batch_size=_ROWS_AT_ONCE)
    while True:
        with reading:
            block = next(blocks, None)
        if block is None:
            return
        yield block


def fingerprint_of(dataset: Any) -> str:
    """The library's identifier for the content of a dataset."""
    return f"{dataset._fingerprint}\0{len(dataset)}"  # there is no public name for it


def load_own_splits(
    paths: Sequence[str], *, subset: str | None, split: str, columns: Columns, show_progress: bool
) -> OwnSplits[Any]:
    """The split `split` of the datasets in `paths`, concatenated, and their own validation and test splits.

    A path is a directory written by `save_to_disk`, a json, parquet, arrow or csv file, a glob or directory of such
    files, or the name of a dataset on the Hub, with @REVISION for a branch, tag or commit. In a directory, files with
    `validation` (valid, val, dev) or `test` in their names form those splits.

    Args:
        subset: the configuration of a dataset on the Hub.
        columns: the columns to read, where a dataset has them; or a function that chooses them from those there are.

    Raises:
        DataError: for a dataset that cannot be found or read, or has no such split.
        MissingExtraError: if `datasets` is not installed.
    """
    with extra("datasets", "this data requires the library 'datasets'"):
        import datasets
    check_subset(paths, subset)
    with _bars(datasets, show_progress):
        loaded = [_load(datasets, path, subset) for path in paths]
    valid_name, test_name = (
        next((name for name in names if name != split and any(name in each for each in loaded)), None)
        for names in (_VALIDATION, _TEST)
    )
    for path, found in zip(paths, loaded, strict=True):
        if split not in found:
            raise DataError(
                f"the dataset {path!r} has no split {split!r}; set dataset.hf_split to one of {list(found)}"
            )
    by_name = [[found[name] for found in loaded if name in found] for name in (split, valid_name, test_name)]
    if callable(columns):
        columns = columns(by_name[0][0].column_names)
    train, valid, test = (_joined(datasets, parts, columns) for parts in by_name)
    dropped = frozenset(column for part in by_name[0] for column in part.column_names).difference(columns)
    return OwnSplits(train, valid, test, dropped)


def is_rows(path: str) -> bool:
    """Whether a path names a dataset of the library rather than JSONL files, which are read without it."""
    given = Path(os.path.expanduser(path))
    if given.is_dir():
        if _is_saved(given):
            return True
        return any(file.suffix in _READ_BY_LIBRARY for file in _visible_files(given))
    if given.is_file() or glob.has_magic(path):
        return given.suffix in _READ_BY_LIBRARY
    return hub_name(path) is not None


def _joined(datasets: Any, parts: Sequence[Any], columns: Sequence[str]) -> Any:
    """The concatenated datasets, reduced to the given columns; None for no datasets.

    A dataset with none of the columns is left unchanged, so that a later error can list its columns.
    """
    read = [[column for column in columns if column in part.column_names] for part in parts]
    chosen = [part.select_columns(names) if names else part for part, names in zip(parts, read, strict=True)]
    if len(chosen) < 2:
        return chosen[0] if chosen else None
    try:
        return datasets.concatenate_datasets(chosen)
    except ValueError as error:
        raise DataError(f"the datasets of dataset.paths differ in their columns: {error}") from error


def _load(datasets: Any, path: str, subset: str | None) -> dict[str, Any]:
    """The splits of one path by name."""
    given = Path(os.path.expanduser(path))
    try:
        if given.is_dir() and _is_saved(given):
            saved = datasets.load_from_disk(str(given))
            return dict(saved) if isinstance(saved, datasets.DatasetDict) else {"train": saved}
        if given.exists() or glob.has_magic(path):
            return _load_files(datasets, path)
        check_exists(path)
        return _load_from_hub(datasets, path, subset)
    except DataError:
        raise
    except Exception as error:  # files that are damaged make the library raise anything
        local = given.exists() or glob.has_magic(path)
        remedy = "check its files" if local else "the Hub requires network access, a local path does not"
        raise DataError(f"cannot load the dataset {path!r}: {type(error).__name__}: {error}; {remedy}") from error


def _load_from_hub(datasets: Any, path: str, subset: str | None) -> dict[str, Any]:
    named = hub_name(path if "@" not in path else pinned(path))
    assert named is not None
    with _from_cache_unless_reached(datasets, *named):
        found = dict(datasets.load_dataset(named[0], subset, revision=named[1]))
    commits = {commit for split in found.values() for commit in hub_commits(split).values()}
    if named[1] is not None and commits - {named[1]}:  # without the Hub, the library reads the newest in its cache
        place = Path(next(split.cache_files[0]["filename"] for split in found.values()))
        return _load_from_cache(path, named[0], named[1], subset, place.parents[3])
    return found


@contextmanager
def _from_cache_unless_reached(datasets: Any, name: str, revision: str | None) -> Iterator[None]:
    """A context in which the library reads its cache at once if the Hub, which is asked once, does not answer."""
    was_offline = datasets.config.HF_HUB_OFFLINE
    unreached: HubUnreachableError | None = None
    try:
        commit_of(name, revision)
    except HubUnreachableError as error:
        datasets.config.HF_HUB_OFFLINE, unreached = True, error
    except DataError:
        pass  # the library names it itself
    try:
        yield
    except Exception as error:
        if unreached is None:
            raise
        raise DataError(
            f"cannot load the dataset {name!r}, which is not in the cache of `datasets`; {unreached}"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def _load_from_cache(path: str, name: str, commit: str, subset: str | None, cache: Path) -> dict[str, Any]:
    """The splits of a commit in the library's cache, whose directories are CONFIGURATION/VERSION/COMMIT."""
    from datasets.packaged_modules.cache.cache import Cache

    places = [(*place.parts[-3:-1], place.name) for place in cache.glob("*/*/*") if COMMIT.fullmatch(place.name)]
    chosen = [one for one in places if one[2] == commit and subset in (None, one[0])]
    if len(chosen) != 1:
        having = ", ".join(f"{each} ({config})" for config, _, each in sorted(places))
        wanted = f"commit {commit}" + ("" if subset is None else f" of the configuration {subset!r}")
        remedy = "set dataset.hf_subset to one of its configurations" if chosen else "connect to the Hub"
        raise DataError(
            f"the Hub cannot be reached for the dataset {path!r}, and the cache {cache} has {len(chosen)} copies of "
            f"{wanted}, only {having}; {remedy}"
        )
    config, version, _ = chosen[0]
    builder = Cache(repo_id=name, dataset_name=name.split("/")[-1], config_name=config, version=version, hash=commit)
    return dict(builder.as_dataset())


def _load_files(datasets: Any, path: str) -> dict[str, Any]:
    given = Path(os.path.expanduser(path))
    files = files_of(path) if given.is_dir() else files_of(path) or [given]
    readers = {_READERS[file.suffix][0] for file in files if file.suffix in _READERS}
    if len(readers) != 1 or any(file.suffix not in _READERS for file in files):
        kinds = ", ".join(sorted(readers)) or "none"
        raise DataError(
            f"{path!r} must contain files of a single kind of {', '.join(_READERS)}, got {kinds}; name the files, or a "
            "directory written by save_to_disk"
        )
    by_split: dict[str, list[str]] = {}
    for file in files:
        words = re.split(r"[^a-z]+", str(file.relative_to(given)).lower()) if given.is_dir() else []
        name = next((_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS), "train")
        by_split.setdefault(name, []).append(str(file.absolute()))
    reader, options = _READERS[files[0].suffix]
    return dict(datasets.load_dataset(reader, data_files=by_split, **options))


def files_of(path: str) -> list[Path]:
    """The local files that a path of `dataset.paths` denotes, sorted; none for a dataset on the Hub."""
    given = Path(os.path.expanduser(path))
    if not given.is_dir():
        return sorted(map(Path, glob.glob(str(given), recursive=True)))
    files = _visible_files(given)
    if _is_saved(given):  # the library keeps the results of its own computations beside the rows
        return [file for file in files if file.suffix == ".arrow" and not file.name.startswith("cache-")]
    return [file for file in files if file.suffix in _READERS]


def _is_saved(directory: Path) -> bool:
    return any((directory / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _visible_files(directory: Path) -> list[Path]:
    found = (Path(root, name) for root, _, names in os.walk(directory) for name in names)
    return sorted(file for file in found if is_visible(file, directory))


@contextmanager
def _bars(datasets: Any, show: bool) -> Iterator[None]:
    """Show or hide the library's own progress bars while it reads files into its cache."""
    change = not show and not datasets.are_progress_bars_disabled()
    if change:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if change:
            datasets.enable_progress_bars()
