"""Makes the token file of a corpus, once for all processes and runs."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout
from tqdm import tqdm

from onstep.data.corpus import Document, is_jsonl, iter_file_documents
from onstep.data.token_file import TokenFile, find_token_file, manifest_path, token_dtype, write_manifest
from onstep.data.tokenizers import Tokenizer
from onstep.errors import DataError

_LOGGER = logging.getLogger(__name__)

_FORMAT = "onstep tokens 1"
_HEAD_START_SECONDS = 5.0
"""How long a process that shall wait for another lets it go first; after that it takes part like any other."""
_POLL_SECONDS = 0.1


def build_token_file(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    cache_dir: str | Path | None,
    text_key: str,
    *,
    show_progress: bool,
    wait_for_other: bool = False,
) -> TokenFile:
    """The token file of `files`, from the cache or made now.

    Any number of processes may call this at once: one makes the file under a lock and the others wait for it. A broken
    file is made again. ``wait_for_other`` lets another process go first (the one that shows the progress bar).

    Args:
        cache_dir: where token files are kept; None is `default_cache_dir()`.
        text_key: key of a JSONL record that holds the text.

    Raises:
        DataError: for a corpus that is empty, unreadable or not text, and for a cache that cannot be written.
    """
    folder = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    source = _source_hash(files, tokenizer, text_key)
    path = folder / f"{source}.tokens"
    found = _wait_for(path) if wait_for_other else find_token_file(path)
    if found is not None:
        return found
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            return find_token_file(path) or _build(path, source, files, tokenizer, text_key, show_progress)


def default_cache_dir() -> Path:
    """`$ONSTEP_CACHE`, else `onstep` in `$XDG_CACHE_HOME` or `~/.cache`."""
    own, shared = os.environ.get("ONSTEP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser()
    return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "onstep"


def _source_hash(files: Sequence[Path], tokenizer: Tokenizer, text_key: str) -> str:
    """A hash of all that the tokens depend on: contents, not names or times."""
    digest = hashlib.blake2b(f"{_FORMAT}\0{tokenizer.fingerprint}\0{tokenizer.eos_id}".encode(), digest_size=16)
    for path in files:
        kind = f"jsonl {text_key}" if is_jsonl(path) else "text"
        try:
            with path.open("rb") as content:
                digest.update(f"\0{kind}\0{os.fstat(content.fileno()).st_size}\0".encode())
                digest.update(hashlib.file_digest(content, "blake2b").digest())
        except OSError as error:
            raise DataError(f"cannot read {path} of the corpus: {error.strerror or error}") from error
    return digest.hexdigest()


def _wait_for(path: Path) -> TokenFile | None:
    deadline = time.monotonic() + _HEAD_START_SECONDS
    while (found := find_token_file(path)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path.with_suffix(".lock"))
    try:
        lock.acquire(timeout=1.0, poll_interval=_POLL_SECONDS)
    except Timeout:
        _LOGGER.info("waiting for another process that makes %s", path)
        lock.acquire(poll_interval=_POLL_SECONDS)
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _writing_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot keep token files in {str(folder)!r}: {error.strerror or error}; set dataset.cache_dir or "
            "ONSTEP_CACHE to a folder that can be written to and has room"
        ) from error


def _build(
    path: Path, source: str, files: Sequence[Path], tokenizer: Tokenizer, text_key: str, show_progress: bool
) -> TokenFile:
    """Writes tokens, then manifest, so that a process killed in between leaves nothing that looks whole."""
    manifest_path(path).unlink(missing_ok=True)
    temporary = path.with_suffix(".tokens.tmp")
    dtype = token_dtype(tokenizer.vocab_size)
    digest = hashlib.blake2b(digest_size=16)
    num_tokens = num_documents = 0
    try:
        with temporary.open("wb") as out:
            for document in _documents(files, text_key, show_progress):
                tokens = _encode(tokenizer, document).astype(dtype)
                digest.update(tokens.data)
                out.write(tokens.data)
                num_tokens += tokens.size
                num_documents += 1
        if num_tokens == 0:
            raise DataError(f"the corpus is empty: no text in {_listed(files)}; give files with text")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    token_file = TokenFile(path, dtype, num_tokens, num_documents, digest.hexdigest(), source)
    write_manifest(token_file)
    return token_file


def _documents(files: Sequence[Path], text_key: str, show_progress: bool) -> Iterator[Document]:
    """The documents that are not empty, with a bar over the bytes of the files."""
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, desc="Tokenizing", unit="B", unit_scale=True, disable=not show_progress) as bar:
        for path in files:
            bytes_left = path.stat().st_size
            for document in iter_file_documents(path, text_key):
                if document.data:
                    yield document
                bytes_done = min(len(document.data), bytes_left)
                bytes_left -= bytes_done
                bar.update(bytes_done)
            bar.update(bytes_left)  # what is not text: keys and quotes of JSONL


def _encode(tokenizer: Tokenizer, document: Document) -> npt.NDArray[Any]:
    try:
        ids = np.asarray(tokenizer.encode(document.data))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{document.place} is not UTF-8: byte 0x{document.data[error.start]:02x} at offset {error.start} "
            f"({error.reason}); convert the file, or use tokenizer_type 'bytes', which takes any bytes"
        ) from error
    if ids.size and not (ids.min() >= 0 and ids.max() < tokenizer.vocab_size):
        raise DataError(
            f"{document.place} has token ids from {ids.min()} to {ids.max()}, but they must be >= 0 and below the "
            f"tokenizer's vocab_size {tokenizer.vocab_size}; check the tokenizer"
        )
    # As uint32, because the end token need not fit the type that the tokenizer gave.
    return ids if tokenizer.eos_id is None else np.append(ids, np.uint32(tokenizer.eos_id))


def _listed(files: Sequence[Path]) -> str:
    names = ", ".join(map(str, files[:3]))
    return f"{names} and {len(files) - 3} more" if len(files) > 3 else names or "no files"
