"""Finds the files of a corpus and iterates over the documents in them."""

from __future__ import annotations

import codecs
import glob
import itertools
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onstep.data.corpus.build_cache import Source
from onstep.data.corpus.file_digests import content_digest
from onstep.data.corpus.not_text import check_prose, check_texts, warn_of_nul
from onstep.data.corpus.reading_bar import reading_bar
from onstep.errors import DataError
from onstep.files.bounded_reading import MAX_JSON_BYTES, parse_json, read_lines

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_PROSE_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html")
_MARKUP_SUFFIXES = (".xml", ".json", ".yaml", ".yml", ".toml")
_SCRIPT_SUFFIXES = (".py", ".pyi", ".js", ".ts", ".sh", ".sql", ".rb", ".lua", ".jl")
_COMPILED_SUFFIXES = (".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java")
TEXT_SUFFIXES = JSONL_SUFFIXES.union(_PROSE_SUFFIXES, _MARKUP_SUFFIXES, _SCRIPT_SUFFIXES, _COMPILED_SUFFIXES)
"""Suffixes to search for in a directory. A file named explicitly or matched by a glob is used whatever its suffix."""

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"})

MAX_RECORD_BYTES = MAX_JSON_BYTES
"""Limit for a line of a JSONL file: some four million tokens. Parsed, it may need 30 times the memory."""
_KEYS_SHOWN = 10


@dataclass(frozen=True)
class Document:
    """A document and its location, for error messages."""

    data: bytes
    path: Path
    line: int | None = None
    """Line of a JSONL record, counted from 1; None for a whole text file."""

    @property
    def place(self) -> str:
        """`file` or `file:line`."""
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"


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


def iter_documents(files: Iterable[Path], text_key: str) -> Iterator[bytes]:
    """The documents of `files` in order, as from `iter_file_documents`, without their locations."""
    for path in files:
        for document in iter_file_documents(path, text_key):
            yield document.data


def iter_file_documents(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of one file: a whole text file, or one per record of a JSONL file (see `JSONL_SUFFIXES`).

    Raises:
        DataError: for a file that cannot be read, and for a malformed JSONL record, with `file:line`.
    """
    try:
        if not is_jsonl(path):
            content = path.read_bytes()
            warn_of_nul(path, content)
            yield Document(content, path)
            return
        with path.open("rb") as lines:
            for number, line in read_lines(lines, MAX_RECORD_BYTES):
                if line.strip():
                    yield Document(_record_text(line, f"{path}:{number}", text_key), path, number)
    except OSError as error:
        raise DataError(f"cannot read corpus file {path}: {error.strerror or error}") from error


def no_text(name: str) -> str:
    """The error message for a source of documents that are all empty."""
    return f"the corpus is empty: no text in {name}; give files with text"


def not_utf8(document: Document, error: UnicodeDecodeError) -> DataError:
    """The error for a document that is not UTF-8 when the tokenizer requires it."""
    data, at = document.data, error.start
    is_surrogate = data[at] == 0xED and len(data) > at + 1 and data[at + 1] >= 0xA0
    reason, fix = (
        ("an unpaired surrogate, which JSON allows", "fix the record")
        if is_surrogate
        else (error.reason, "convert the file")
    )
    return DataError(
        f"{document.place} is not UTF-8: byte 0x{data[at]:02x} at offset {at} ({reason}); {fix}, or use "
        "tokenizer_type 'bytes', which accepts any encoding"
    )


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
            f"the corpus path {given!r} does not exist (working directory: {Path.cwd()}); check dataset.paths"
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


def read_record(line: bytes, place: str, rule: str = "one JSON object") -> dict[str, Any]:
    """Parse the object in a line of a JSONL file; `rule` says in errors what a line must contain.

    Raises:
        DataError: with `place`, for anything else.
    """
    try:
        record = parse_json(line.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogatepass"), place)
    except UnicodeDecodeError as error:
        raise DataError(f"{place} is not valid JSON: {error}. Each line must contain {rule}.") from error
    except DataError as error:
        raise DataError(f"{error} Each line must contain {rule}.") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} contains a JSON {type(record).__name__}; each line must contain {rule}")
    return record


def first_keys(record: Mapping[str, Any]) -> str:
    """The first keys of a record, for messages."""
    shown = [short(key) for key in itertools.islice(record, _KEYS_SHOWN)]
    return ", ".join(shown + ["..."] * (len(record) > len(shown))) or "none"


def short(value: Any) -> str:
    """`repr(value)`, shortened to 80 characters."""
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def _record_text(line: bytes, place: str, text_key: str) -> bytes:
    record = read_record(line, place, f"an object with {text_key!r}")
    if text_key not in record:
        raise DataError(f"{place} has no key {text_key!r} (its keys: {first_keys(record)}); set dataset.text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {text_key!r} must be a string, got {type(text).__name__}; set dataset.text_key")
    # An unpaired surrogate is legal JSON but not UTF-8; it is passed on to the tokenizer, which decides.
    return text.encode("utf-8", "surrogatepass")


class DocumentSource(Source, Protocol):
    """A source of documents in a fixed order."""

    def documents(self, label: str | None) -> Iterator[Document]:
        """The non-empty documents; `label` names the progress bar, None shows none."""


class FileSource:
    """The documents of text and JSONL files, identified by content: file names and times do not matter."""

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        self.files = files
        self.text_key = text_key
        names = ", ".join(map(str, files[:3]))
        self.name = f"{names} and {len(files) - 3} more" if len(files) > 3 else names or "no files"
        """Names of the first files."""

    def add_to(self, digest: Any) -> None:
        """Add the kind, size and content of each file."""
        for path in self.files:
            add_file(digest, path, f"jsonl {self.text_key}" if is_jsonl(path) else "text")

    def documents(self, label: str | None) -> Iterator[Document]:
        """One document per text file or JSONL record, with a progress bar over the bytes of the files."""
        total = sum(path.stat().st_size for path in self.files)
        with reading_bar(label, total, "B") as bar:
            for path in self.files:
                bytes_left = path.stat().st_size
                for document in iter_file_documents(path, self.text_key):
                    if document.data:
                        yield document
                    bytes_done = min(len(document.data), bytes_left)
                    bytes_left -= bytes_done
                    bar.update(bytes_done)
                bar.update(bytes_left)  # bytes that are not text, such as keys and quotes of JSONL


def add_file(digest: Any, path: Path, kind: str) -> None:
    """Update the hash `digest` with the content of a file that is read as `kind`.

    Raises:
        DataError: if the file cannot be read.
    """
    try:
        size, content = content_digest(path)
    except OSError as error:
        raise DataError(f"cannot read corpus file {path}: {error.strerror or error}") from error
    digest.update(f"\0{kind}\0{size}\0".encode())
    digest.update(content)
