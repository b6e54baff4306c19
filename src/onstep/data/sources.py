"""Where documents come from: what tokenizing, and learning a tokenizer, read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from onstep.data.corpus import Document, is_jsonl, iter_file_documents
from onstep.errors import DataError


class DocumentSource(Protocol):
    """Documents in a fixed order."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def add_to(self, digest: Any) -> None:
        """Update the hash `digest` with all that the documents depend on.

        Raises:
            DataError: where that cannot be read.
        """

    def documents(self, label: str | None) -> Iterator[Document]:
        """The documents that are not empty; `label` names the progress bar, None shows none."""


class FileSource:
    """The documents of text and JSONL files, by their contents: names and times of the files do not count."""

    def __init__(self, files: Sequence[Path], text_key: str) -> None:
        self.files = files
        self.text_key = text_key

    @property
    def name(self) -> str:
        """The first files."""
        names = ", ".join(map(str, self.files[:3]))
        return f"{names} and {len(self.files) - 3} more" if len(self.files) > 3 else names or "no files"

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
