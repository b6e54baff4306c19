"""Iterates over the documents in the files of a corpus."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from onstep.data.corpus.build_cache import Source
from onstep.data.corpus.file_digests import content_digest
from onstep.data.corpus.not_text import warn_of_nul
from onstep.data.corpus.reading_bar import reading_bar
from onstep.data.corpus.text_files import is_jsonl
from onstep.errors import DataError
from onstep.files.bounded_reading import MAX_JSON_BYTES, brief, parse_json, read_lines

MAX_RECORD_BYTES = MAX_JSON_BYTES
"""Limit for a line of a JSONL file: some four million tokens. Parsed, it may need 30 times the memory."""
_KEYS_SHOWN = 10


@dataclass(frozen=True)
class Document:
    """A document and its location, for error messages."""

    data: bytes
    path: Path | str
    line: int | None = None
    """Line of a JSONL record, counted from 1; None for a whole text file, or if `path` says it."""

    @property
    def place(self) -> str:
        """`file` or `file:line`."""
        return str(self.path) if self.line is None else f"{self.path}:{self.line}"


def iter_documents(files: Iterable[Path], text_key: str) -> Iterator[bytes]:
    """The documents of `files` in order, as from `iter_file_documents`, without their locations.

    Args:
        text_key: the field of a JSON record that has the text.
    """
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
                    place = f"{path}:{number}"
                    record = read_record(line, place, f"an object with {text_key!r}")
                    yield Document(text_of_record(record, place, text_key), path, number)
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
    shown = [brief(key, 80) for key in itertools.islice(record, _KEYS_SHOWN)]
    return ", ".join(shown + ["..."] * (len(record) > len(shown))) or "none"


def text_of_record(record: Mapping[str, Any], place: str, text_key: str) -> bytes:
    """The text of a record.

    Raises:
        DataError: with `place`, for a record without it.
    """
    if text_key not in record:
        raise DataError(
            f"{place} has no key {text_key!r} (its keys: {first_keys(record)}); set dataset.text_key, or name the "
            "files that are meant in dataset.paths"
        )
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
