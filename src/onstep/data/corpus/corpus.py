"""A corpus: which files it consists of, the documents in them, and what tokenizing reads."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from onstep.data.corpus.build_cache import Source
from onstep.errors import DataError

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".jsonlines"})
_PROSE_SUFFIXES = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html")
_TABLE_SUFFIXES = (".xml", ".csv", ".tsv", ".json", ".yaml", ".yml", ".toml")
_SCRIPT_SUFFIXES = (".py", ".pyi", ".js", ".ts", ".sh", ".sql", ".rb", ".lua", ".jl")
_COMPILED_SUFFIXES = (".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java")
TEXT_SUFFIXES = JSONL_SUFFIXES.union(_PROSE_SUFFIXES, _TABLE_SUFFIXES, _SCRIPT_SUFFIXES, _COMPILED_SUFFIXES)
"""What a folder is searched for. A file that is named, or matched by a glob, is taken whatever its suffix."""

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"})


@dataclass(frozen=True)
class Document:
    """One document and where it stands, for the messages of errors."""

    data: bytes
    path: Path
    line: int | None = None
    """Line of a JSONL record, from 1; None for a whole text file."""

    @property
    def place(self) -> str:
        """`file` or `file:line`."""
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"


def find_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """All files that the files, folders and globs in `paths` stand for, sorted and each once.

    Folders are searched recursively for `TEXT_SUFFIXES`, leaving out hidden ones.

    Raises:
        DataError: where `paths` is a single string or one of them stands for no file.
    """
    if isinstance(paths, (str, os.PathLike)):
        raise DataError(f"paths must be a list of files, folders or globs, got {str(paths)!r}; put it in a list")
    found: set[Path] = set()
    for given in paths:
        found.update(_files_of(os.fspath(given)))
    if not found:
        raise DataError("the corpus is empty: paths names no file; give text files, folders, globs or JSONL files")
    return sorted(found)


def find_records(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """As `find_files`, but a folder stands for its JSONL files only.

    Raises:
        DataError: as `find_files`.
    """
    found = [
        path
        for given in paths
        for path in find_files([given])
        if is_jsonl(path) or not Path(given).expanduser().is_dir()
    ]
    if not found:
        raise DataError(f"the folders {', '.join(map(str, paths))} have no JSONL file; name the files of conversations")
    return sorted(set(found))


def default_corpus_files() -> list[Path]:
    """The sources of the running Python's standard library: real text of about 10 MB that needs no network.

    Tests and installed packages are left out, so that the text depends on the Python release alone.

    Raises:
        DataError: where this Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_CORPUS]  # walks no further into these
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"no Python sources below {root} for the default corpus; set dataset.paths to text of your own")
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def iter_documents(files: Iterable[Path], text_key: str) -> Iterator[bytes]:
    """The documents of `files` in order, as `iter_file_documents` gives them, without their places."""
    for path in files:
        for document in iter_file_documents(path, text_key):
            yield document.data


def iter_file_documents(path: Path, text_key: str) -> Iterator[Document]:
    """The documents of one file: the whole of a text file, or one a record of a JSONL file (see `JSONL_SUFFIXES`).

    Raises:
        DataError: for a file that cannot be read, and for a malformed JSONL record, with `file:line`.
    """
    try:
        if not is_jsonl(path):
            yield Document(path.read_bytes(), path)
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield Document(_record_text(line, f"{path}:{number}", text_key), path, number)
    except OSError as error:
        raise DataError(f"cannot read {path} of the corpus: {error.strerror or error}") from error


def not_utf8(document: Document, error: UnicodeDecodeError) -> DataError:
    """What to say where a tokenizer takes UTF-8 and a document is not."""
    data, at = document.data, error.start
    is_surrogate = data[at] == 0xED and len(data) > at + 1 and data[at + 1] >= 0xA0
    reason, mend = (
        ("half of a pair of surrogates, as JSON may hold", "mend the record")
        if is_surrogate
        else (error.reason, "convert the file")
    )
    return DataError(
        f"{document.place} is not UTF-8: byte 0x{data[at]:02x} at offset {at} ({reason}); {mend}, or use "
        "tokenizer_type 'bytes', which takes any bytes"
    )


def is_jsonl(path: Path) -> bool:
    """Whether each line of the file is a JSON record."""
    return path.suffix.lower() in JSONL_SUFFIXES


def _files_of(given: str) -> list[Path]:
    path = Path(given).expanduser()
    if path.exists():
        matches = [path]
        rule = f"the folder {given!r} of the corpus has no text-like file; name the files or give a glob"
    elif glob.has_magic(given):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        rule = f"the glob {given!r} of the corpus matches no file; check the pattern and the working folder"
    else:
        raise DataError(f"the corpus path {given!r} does not exist (working folder: {Path.cwd()}); check dataset.paths")
    files = [match for match in matches if not match.is_dir()]
    for folder in [match for match in matches if match.is_dir()]:
        found = (file for file in folder.rglob("*") if file.suffix.lower() in TEXT_SUFFIXES)
        files += [file for file in found if is_visible(file, folder) and file.is_file()]
    if not files:
        raise DataError(rule)
    return files


def is_visible(path: Path, folder: Path) -> bool:
    """Whether neither the file nor a folder between it and `folder` is hidden."""
    return not any(part.startswith(".") for part in path.relative_to(folder).parts)


def read_record(line: bytes, place: str, rule: str = "one JSON object") -> dict[str, Any]:
    """The object in a line of a JSONL file; `rule` says what a line must hold.

    Raises:
        DataError: with `place`, for anything else.
    """
    try:
        record = json.loads(line)
    except ValueError as error:  # malformed JSON or bytes that are not UTF-8
        raise DataError(f"{place} is not a JSON record: {error}; each line must hold one JSON object") from error
    if not isinstance(record, dict):
        raise DataError(f"{place} holds a JSON {type(record).__name__}; each line must hold {rule}")
    return record


def _record_text(line: bytes, place: str, text_key: str) -> bytes:
    record = read_record(line, place, f"an object with {text_key!r}")
    if text_key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f"{place} has no key {text_key!r} (its keys: {keys}); set dataset.text_key")
    text = record[text_key]
    if not isinstance(text, str):
        raise DataError(f"{place}: {text_key!r} must be a string, got {type(text).__name__}; set dataset.text_key")
    # A lone surrogate is legal JSON but not UTF-8; it stays visible to the tokenizer, which decides.
    return text.encode("utf-8", "surrogatepass")


class DocumentSource(Source, Protocol):
    """Documents in a fixed order."""

    def documents(self, label: str | None) -> Iterator[Document]:
        """The documents that are not empty; `label` names the progress bar, None shows none."""


class FileSource:
    """The documents of text and JSONL files, by their contents: names and times of the files do not count."""

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        self.files = files
        self.text_key = text_key
        names = ", ".join(map(str, files[:3]))
        self.name = f"{names} and {len(files) - 3} more" if len(files) > 3 else names or "no files"
        """The first files."""

    def add_to(self, digest: Any) -> None:
        """Kind, size and content of each file."""
        for path in self.files:
            add_file(digest, path, f"jsonl {self.text_key}" if is_jsonl(path) else "text")

    def documents(self, label: str | None) -> Iterator[Document]:
        """One a text file or JSONL record, with a bar over the bytes of the files."""
        total = sum(path.stat().st_size for path in self.files)
        with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=label is None) as bar:
            for path in self.files:
                bytes_left = path.stat().st_size
                for document in iter_file_documents(path, self.text_key):
                    if document.data:
                        yield document
                    bytes_done = min(len(document.data), bytes_left)
                    bytes_left -= bytes_done
                    bar.update(bytes_done)
                bar.update(bytes_left)  # what is not text: keys and quotes of JSONL


def add_file(digest: Any, path: Path, kind: str) -> None:
    """Update the hash `digest` with the content of a file that is read as `kind`.

    Raises:
        DataError: where the file cannot be read.
    """
    try:
        with path.open("rb") as content:
            digest.update(f"\0{kind}\0{os.fstat(content.fileno()).st_size}\0".encode())
            digest.update(hashlib.file_digest(content, "blake2b").digest())
    except OSError as error:
        raise DataError(f"cannot read {path} of the corpus: {error.strerror or error}") from error
