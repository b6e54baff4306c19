"""Finds the text files of a corpus."""

from __future__ import annotations

import glob
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from onstep.config.suggestions import nearest_path
from onstep.data.corpus.not_text import check_prose, check_texts
from onstep.errors import DataError

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".jsonlines"})

_PROSE_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html")

_MARKUP_SUFFIXES = (".xml", ".json", ".yaml", ".yml", ".toml")

_SCRIPT_SUFFIXES = (".py", ".pyi", ".js", ".ts", ".sh", ".sql", ".rb", ".lua", ".jl")

_COMPILED_SUFFIXES = (".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java")

TEXT_SUFFIXES = JSONL_SUFFIXES.union(_PROSE_SUFFIXES, _MARKUP_SUFFIXES, _SCRIPT_SUFFIXES, _COMPILED_SUFFIXES)
"""Suffixes to search for in a directory. A file named explicitly or matched by a glob is used whatever its suffix."""

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"})


def find_files(paths: Iterable[str | os.PathLike[str]], *, at_most: int | None = None) -> list[Path]:
    """All files denoted by the files, directories and globs in `paths`, sorted and without duplicates.

    Directories are searched recursively for `TEXT_SUFFIXES`, skipping hidden files and directories, and the directories
    of runs in them, whose logs and records change while they are trained.

    Args:
        paths: files, directories and globs.
        at_most: only look for so many files of each directory or glob; None looks for all.

    Raises:
        DataError: if `paths` is a single string, or one of its items matches no file, or one that is not text.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise DataError(f"paths must be a list of files, directories or globs, got {str(paths)!r}; put it in a list")
    found: set[Path] = set()
    for given in paths:
        found.update(_files_of(os.fspath(given), at_most))
    if not found:
        raise DataError("the corpus is empty: paths names no files; give text files, directories, globs or JSONL files")
    files = sorted(found)
    check_texts(files)
    return files


def find_records(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """Like `find_files`, but only finds the JSONL files of a directory.

    Raises:
        DataError: as for `find_files`.
    """
    found = [
        path
        for given in paths
        for path in find_files([given])
        if is_jsonl(path) or not Path(os.path.expanduser(given)).is_dir()
    ]
    if not found:
        raise DataError(f"there are no JSONL files in {', '.join(map(str, paths))}; name the files of conversations")
    return sorted(set(found))


_UNREAD_TEXT = frozenset(
    {".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".parquet", ".arrow", ".csv", ".tsv", ".pdf"}
)
"""Suffixes of files that hold text or data, but are not searched for in a directory."""


def unread_notes(paths: Iterable[str | os.PathLike[str]], *, only_records: bool = False) -> list[str]:
    """What `find_files` leaves out of `paths` (`find_records` with `only_records`), in words."""
    suffixes: Counter[str] = Counter()
    times: Counter[Path] = Counter()
    runs: set[Path] = set()
    for path in (Path(os.path.expanduser(given)) for given in paths):
        if not path.is_dir():
            times[path.absolute()] += 1
            continue
        unread = (_UNREAD_TEXT | TEXT_SUFFIXES) - JSONL_SUFFIXES if only_records else _UNREAD_TEXT
        found = (file for file in _files_below(path) if file.suffix.lower() in unread and is_visible(file, path))
        suffixes.update(file.suffix.lower() for file in found)
        runs |= _runs_in(path)
    notes = [f"{path} is named {count} times and read once" for path, count in times.items() if count > 1]
    if suffixes:
        counted = ", ".join(f"{count} {suffix}" for suffix, count in sorted(suffixes.items()))
        notes.append(f"files in its directories are not read for their suffix: {counted}")
    if runs:
        shown = ", ".join(sorted(map(str, runs))[:3])
        notes.append(f"directories of runs are not read: {len(runs)}, such as {shown}")
    return notes


def default_corpus_files() -> list[Path]:
    """The source files of Python's standard library: about 10 MB of real text, available without a network.

    Tests and installed packages are excluded, so the text depends only on the Python release.

    Raises:
        DataError: if this Python installation has no sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in _NOT_CORPUS]  # do not descend into these
        files += [Path(directory, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"no Python sources below {root} for the default corpus; set dataset.paths to your own text")
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def is_jsonl(path: Path) -> bool:
    """Whether each line of the file is a JSON record."""
    return path.suffix.lower() in JSONL_SUFFIXES


def _files_of(given: str, at_most: int | None) -> list[Path]:
    path = Path(os.path.expanduser(given))
    if os.path.exists(path):
        matches = [path]
        rule = f"the corpus directory {given!r} has no text files; name the files or give a glob"
    elif glob.has_magic(given):
        matches = [Path(match) for match in itertools.islice(glob.iglob(str(path), recursive=True), at_most)]
        rule = f"the corpus glob {given!r} matches no files; check the pattern and the working directory"
    else:
        raise DataError(
            f"the corpus path {given!r} does not exist (working directory: {Path.cwd()}); check dataset.paths."
            f"{nearest_path(given)}"
        )
    files = [match for match in matches if not match.is_dir()]
    for special in (file for file in files if not file.is_file()):
        raise DataError(
            f"the corpus path {str(special)!r} is not a regular file, and files are read twice; copy it to one"
        )
    for file in files:
        check_prose(file)
    for directory in [match for match in matches if match.is_dir()]:
        try:
            texts = (file for file in _texts_in(directory) if file.is_file())
            files += itertools.islice(texts, None if at_most is None else at_most - len(files))
        except OSError as error:
            raise DataError(
                f"cannot read {error.filename} in the corpus directory {given!r}: {error.strerror}; check its "
                f"permissions, or name the files"
            ) from error
    if not files:
        raise DataError(rule)
    return files


_RUN_MARK = ".run.lock"
"""A file in the directory of every run."""


def _runs_in(directory: Path) -> set[Path]:
    """The directories of runs below a directory."""
    return {file.parent for file in _files_below(directory) if file.name == _RUN_MARK} - {directory}


def _files_below(directory: Path) -> Iterator[Path]:
    """All files of a directory, as far as it can be listed."""
    return (Path(place, name) for place, _, names in os.walk(directory) for name in names)


def _texts_in(directory: Path) -> Iterator[Path]:
    """The visible files with text suffixes below a directory, except those of runs.

    Raises:
        OSError: for a directory that cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    for parent, subdirectories, names in os.walk(directory, onerror=refuse):
        if _RUN_MARK in names and Path(parent) != directory:
            subdirectories.clear()
            continue
        subdirectories[:] = [name for name in subdirectories if not name.startswith(".")]
        visible = (name for name in names if not name.startswith("."))
        yield from (Path(parent, name) for name in visible if os.path.splitext(name)[1].lower() in TEXT_SUFFIXES)


def is_visible(path: Path, directory: Path) -> bool:
    """Whether neither the file nor any directory between it and `directory` is hidden."""
    return not any(part.startswith(".") for part in path.relative_to(directory).parts)
