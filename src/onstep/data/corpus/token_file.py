"""Stores the tokens of a corpus in a memory-mapped file, built once for all processes and runs.

A manifest next to the file records whether it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from onstep.data.corpus.build_cache import build_cached, write_text
from onstep.data.corpus.coverage import Coverage
from onstep.data.corpus.documents import Document, DocumentSource, FileSource, no_text, not_utf8
from onstep.data.corpus.file_digests import sampled_digest
from onstep.data.corpus.tokenizers import Tokenizer
from onstep.errors import DataError
from onstep.files.bounded_reading import read_json
from onstep.processes.heartbeat import HEARTBEAT

_BLOCK_BYTES = 64 * 1024
_MANIFEST_BYTES = 64 * 1024
_DTYPES = ("<u2", "<u4", "<i8")
_WRITTEN_AT_ONCE = 1 << 20
"""Number of tokens."""


@dataclass
class TokenFile:
    """The tokens of all documents of a corpus, concatenated. Pickled to workers as a path only."""

    path: Path
    """The raw tokens, little-endian; the manifest is next to it."""
    dtype: str
    """`<u2` or `<u4`; `<i8` for the index of conversations."""
    num_tokens: int
    """Tokens in the file."""
    num_documents: int
    """Documents in the file."""
    content_hash: str
    """Hash of the tokens."""
    source: str
    """Hash of the corpus, the tokenizer and the format: the cache key."""

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens ``(num_tokens,)``, memory-mapped on first use, read-only."""
        if "_tokens" not in self.__dict__:
            # A plain array over the mapping: slicing np.memmap itself is several times slower.
            self._tokens = np.asarray(np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.num_tokens,)))
        return self._tokens

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """The tokens ``start <= t < stop``, read-only."""
        return self.tokens[start:stop]

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_tokens"}


def check_ids(ids: npt.NDArray[Any], tokenizer: Tokenizer, place: str) -> None:
    """Refuse ids outside the tokenizer's vocabulary; `place` names their origin in the error."""
    if ids.size and not (ids.min() >= 0 and ids.max() < tokenizer.vocab_size):
        raise DataError(
            f"{place} has token ids from {ids.min()} to {ids.max()}, but they must be >= 0 and below the "
            f"tokenizer's vocab_size of {tokenizer.vocab_size}; check the tokenizer"
        )


def token_dtype(vocab_size: int) -> str:
    """The smallest on-disk dtype that holds every id."""
    return "<u2" if vocab_size <= 2**16 else "<u4"


def write_tokens(
    path: Path,
    dtype: str,
    documents: Iterable[npt.NDArray[Any]],
    source: str,
    empty: str,
    *,
    end_id: int | None = None,
) -> TokenFile:
    """Write `documents` to `path` in order, then the manifest that marks the file as complete.

    If the process is killed in between, nothing that looks complete is left behind.

    Args:
        empty: the error message if there are no tokens.
        end_id: written after each document; None writes nothing.

    Raises:
        DataError: if there are no tokens.
    """
    manifest_path(path).unlink(missing_ok=True)
    temporary = path.with_suffix(".tokens.tmp")
    digest = hashlib.blake2b(digest_size=16)
    num_tokens = num_documents = 0

    def write(values: npt.NDArray[Any]) -> None:
        nonlocal num_tokens
        tokens = np.ascontiguousarray(values.astype(dtype))
        digest.update(tokens.data)
        out.write(tokens.data)
        num_tokens += tokens.size

    try:
        with temporary.open("wb") as out:
            for document in documents:
                for start in range(0, document.shape[0], _WRITTEN_AT_ONCE):
                    write(document[start : start + _WRITTEN_AT_ONCE])
                if end_id is not None:
                    write(np.array([end_id]))
                num_documents += 1
        if num_tokens == 0:
            raise DataError(empty)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    token_file = TokenFile(path, dtype, num_tokens, num_documents, digest.hexdigest(), source)
    manifest = asdict(token_file) | {"path": path.name, "check": sampled_digest(path, _BLOCK_BYTES)}
    write_text(manifest_path(path), json.dumps(manifest, indent=1))  # atomically marks the tokens as complete
    return token_file


def find_token_file(path: Path) -> TokenFile | None:
    """The token file at `path`, or None if it is missing or does not match its manifest.

    The check covers the size and at most 4 MiB of blocks spread over the file.
    """
    try:
        manifest = read_json(manifest_path(path), limit=_MANIFEST_BYTES)
        if not _is_manifest(manifest):
            return None
        check = manifest.pop("check")
        token_file = TokenFile(**(manifest | {"path": path}))
        has_size = path.stat().st_size == token_file.num_tokens * np.dtype(token_file.dtype).itemsize
        return token_file if has_size and sampled_digest(path, _BLOCK_BYTES) == check else None
    except (OSError, DataError):  # missing, or not JSON
        return None


def _is_manifest(found: Any) -> bool:
    """Whether a JSON value is a manifest as `write_tokens` writes it."""
    if not isinstance(found, dict) or found.keys() != {*TokenFile.__dataclass_fields__, "check"}:
        return False
    numbers = [found[name] for name in ("num_tokens", "num_documents")]
    if not all(type(number) is int and number > 0 for number in numbers):
        return False
    return found["dtype"] in _DTYPES and isinstance(found["content_hash"], str) and isinstance(found["source"], str)


def manifest_path(path: Path) -> Path:
    """Path of the manifest of the tokens at `path`."""
    return path.with_suffix(".json")


_FORMAT = "onstep tokens 1"


def build_token_file(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    text_key: str,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> TokenFile:
    """The token file of `files`, from the cache or built now.

    Any number of processes may call this concurrently: one builds the file under a lock and the others wait for it. A
    damaged file is rebuilt. ``wait_for_other`` lets another process go first (the one that shows the progress bar).

    Args:
        cache_dir: directory for token files; None means `default_cache_dir()`.
        text_key: key of a JSONL record that holds the text.
        tokenizer: the tokenizer that encodes the texts.
        show_progress: whether a progress bar is shown.

    Raises:
        DataError: for a corpus that is empty, unreadable or not text, or a cache that cannot be written.
    """
    source = FileSource(files, text_key)
    return tokens_of(source, tokenizer, cache_dir, show_progress=show_progress, wait_for_other=wait_for_other)


def tokens_of(
    source: DocumentSource,
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> TokenFile:
    """Like `build_token_file`, for the documents of `source`.

    Raises:
        DataError: as for `build_token_file`.
    """

    def make(path: Path) -> TokenFile:
        coverage = Coverage(tokenizer)
        documents = (
            encode_document(tokenizer, document, coverage)
            for document in source.documents("Tokenizing" if show_progress else None)
        )
        dtype = token_dtype(tokenizer.vocab_size)
        written = write_tokens(path, dtype, documents, path.stem, no_text(source.name), end_id=tokenizer.eos_id)
        coverage.warn(source.name)
        return written

    described = f"{_FORMAT}\0{tokenizer.fingerprint}\0{tokenizer.eos_id}"
    return build_cached(source, described, ".tokens", cache_dir, find_token_file, make, wait_for_other=wait_for_other)


def encode_document(tokenizer: Tokenizer, document: Document, coverage: Coverage | None = None) -> npt.NDArray[Any]:
    """The ids of a document, without its end token.

    Raises:
        DataError: with its place, for a document that cannot be encoded.
    """
    HEARTBEAT.beats += 1
    try:
        ids = np.asarray(tokenizer.encode(document.data))
    except UnicodeDecodeError as error:
        raise not_utf8(document, error) from error
    except DataError as error:
        raise DataError(f"{document.place}: {error}") from error
    check_ids(ids, tokenizer, document.place)
    if coverage is not None:
        coverage.add(document.data, ids)
    return ids
