"""Refuses files that are not text, and tables, before they are trained on as prose."""

from __future__ import annotations

import codecs
import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from onstep.data.corpus.file_digests import stamp_of
from onstep.errors import DataError, warn_once

_LOGGER = logging.getLogger(__name__)

_HEAD_BYTES = 8192
"""Bytes of each file that are looked at; git looks at as many to tell binary files from text."""
_CONTROLS = bytes(set(range(0x20)) - set(b"\t\n\v\f\r\b\x1b")) + b"\x7f"
_MOST_CONTROLS = 0.02
"""Share of control characters up to which what is not UTF-8 is text, in another encoding."""

_AS_RECORDS = (
    "read it with dataset.kind=huggingface and dataset.text_key, the key of the texts, or name it .jsonl if each line "
    "is a record"
)
_RECORDS = re.compile(rb"\s*(\[\s*\{|\{[^\n]*\}\s*\n\s*\{)")
"""How a list of JSON objects begins, and JSON objects that follow each other in lines."""
_AS_TABLE = "read a table with dataset.kind=huggingface and dataset.text_key, the column of the texts"
_EXTRACT = "extract its text first, and train on that"
_UNPACK = "unpack it first"
_NOT_PROSE = {
    ".csv": f"is a table, whose commas and quotes would be learnt as prose; {_AS_TABLE}",
    ".tsv": f"is a table, whose tabs would be learnt as prose; {_AS_TABLE}",
    ".ipynb": "is a notebook, whose JSON would be learnt as prose; convert it, for example with jupyter nbconvert",
}


@dataclass(frozen=True)
class _Kind:
    name: str
    remedy: str
    suffixes: tuple[str, ...]
    magics: tuple[bytes, ...] = ()


_KINDS = (
    _Kind("a spreadsheet", f"export it as csv; {_AS_TABLE}", (".xlsx", ".xls", ".ods")),
    _Kind(
        "a document of an office program",
        _EXTRACT,
        (".docx", ".doc", ".odt", ".pptx", ".epub"),
        (b"\xd0\xcf\x11\xe0", b"{\\rtf"),
    ),
    _Kind("PostScript", "extract its text first, for example with ps2ascii", (".ps", ".eps"), (b"%!PS",)),
    _Kind("a PDF", "extract its text first, for example with pdftotext, and train on that", (".pdf",), (b"%PDF-",)),
    _Kind("a table", _AS_TABLE, (".parquet", ".arrow", ".feather"), (b"PAR1\x15", b"ARROW1\0\0")),
    _Kind("a database", "export its texts as JSONL", (".db", ".sqlite"), (b"SQLite format 3\0",)),
    _Kind("an archive", _UNPACK, (".zip", ".tar"), (b"PK\x03\x04", b"7z\xbc\xaf\x27\x1c")),
    _Kind(
        "a compressed file",
        _UNPACK,
        (".gz", ".bz2", ".xz", ".zst"),
        (b"\x1f\x8b", b"BZh91AY&SY", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"),
    ),
    _Kind("an image", "name text files", (), (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")),
    _Kind("UTF-16 text", "convert it to UTF-8, for example with iconv", (), (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)),
    _Kind("tensors or arrays", "name text files", (".npy", ".npz", ".pt", ".safetensors"), (b"\x93NUMPY", b"\x89HDF")),
)
_BINARY = _Kind("binary data", "name text files, or extract the text first", ())


_SEEN: dict[Path, tuple[int, ...]] = {}
"""Files that this process has seen to be text, as they were then: the first of a corpus are checked several times."""
_MOST_SEEN = 10_000


def check_texts(files: Iterable[Path]) -> None:
    """Check the suffix and the first bytes of each file of a corpus of prose. Other encodings than UTF-8 are text.

    Raises:
        DataError: for a file that is not text, or a table, with what it looks like.
    """
    for path in files:
        stamp = _stamp(path) if path in _SEEN or len(_SEEN) < _MOST_SEEN else None
        if stamp is not None and _SEEN.get(path) == stamp:
            continue
        if path.suffix.lower() in _NOT_PROSE:
            raise DataError(f"{path} {_NOT_PROSE[path.suffix.lower()]}")
        head = _head(path)
        found = _binary_byte(head)
        if found is not None:
            kind, at = found
            kind = _by_suffix(path) or kind
            raise DataError(
                f"{path} is not text: it looks like {kind.name} (byte 0x{head[at]:02x} at offset {at}); {kind.remedy}"
            )
        if stamp is not None:
            _SEEN[path] = stamp


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        return stamp_of(path.stat())
    except OSError:
        return None


def has_content(path: Path) -> bool:
    """Whether a file has a byte; the size of one that the system makes up, as in /proc, is 0.

    Raises:
        DataError: if it cannot be read.
    """
    try:
        return path.stat().st_size > 0 or bool(_head(path))
    except OSError:
        return bool(_head(path))  # which says why it cannot be read


def warn_of_nul(path: Path, content: bytes) -> None:
    """Warn of binary data that follow a head that is text."""
    if (count := content.count(b"\0")) > 0:
        at = content.index(b"\0")
        warn_once(
            _LOGGER,
            f"{path} has {count} NUL byte{'s' * (count > 1)}, the first at offset {at}: text has none, so part of it "
            f"may be damaged or binary, and it is trained on; remove that part, or leave out the file",
        )


def check_prose(path: Path) -> None:
    """Check that a file that is named as prose, rather than found in a directory, is not JSON with records.

    Raises:
        DataError: for a `.json` file that holds a list of records, or one record in each line.
    """
    if path.suffix.lower() == ".json" and _RECORDS.match(_head(path).removeprefix(codecs.BOM_UTF8)):
        raise DataError(f"{path} is JSON with records, whose keys and quotes would be learnt as prose; {_AS_RECORDS}")


def _head(path: Path) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a kernel's log would be waited for
        with open(descriptor, "rb", buffering=0) as file:
            return file.read(_HEAD_BYTES) or b""
    except OSError as error:
        raise DataError(f"cannot read corpus file {path}: {error.strerror or error}") from error


def _binary_byte(head: bytes) -> tuple[_Kind, int] | None:
    """What a file that starts like this is, and the offset of the byte that shows it; None for text."""
    for kind in _KINDS:
        if any(head.startswith(magic) for magic in kind.magics):
            return kind, 0
    if b"\0" in head:
        return _BINARY, head.index(0)
    controls = [at for at, byte in enumerate(head) if byte in _CONTROLS] if not _is_utf8(head) else []
    return (_BINARY, controls[0]) if len(controls) > _MOST_CONTROLS * len(head) else None


def _is_utf8(head: bytes) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut off
    except UnicodeDecodeError:
        return False
    return True


def _by_suffix(path: Path) -> _Kind | None:
    return next((kind for kind in _KINDS if path.suffix.lower() in kind.suffixes), None)
